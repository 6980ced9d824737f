"""Scores of answers: the share of what was asked for that is found in them (RULER's recall)."""

from collections.abc import Sequence

from dustin_hf.eval.ruler.words import words


def score(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers, 0 to 1, that occur in the prediction as a whole word or number, in whatever case.

    RULER takes any occurrence as part of the text, so that 12345 also finds 123. Here an answer must be one of the
    prediction's `words`: letters or digits next to it make it another word (123 is not in 12345, x123 or 123rd), and so
    do a decimal point and commas between groups of three digits (123 is not in 123.45 or 123,456). As in RULER, a
    number written with such commas is not the one without, and wrong words beside the right ones cost nothing.

    Args:
        prediction: the answer as generated, without the start that the prompt gives.
        answers: those of the sample.

    Raises:
        ValueError: if there are no answers, a single text is given instead, or one of them is not a single word.
    """
    if isinstance(answers, str) or not answers:
        raise ValueError(f"`answers` must be a list of at least one word, got {answers!r:.80}: pass the sample's")
    for answer in answers:
        if words(answer) != [answer.lower()]:
            raise ValueError(f"`answers` must each be a single word or number, got {answer!r:.80}: pass the sample's")
    found = set(words(prediction))
    return sum(answer.lower() in found for answer in answers) / len(answers)


def score_task(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Score of a task at one length, 0 to 100, rounded to 2 places: the mean over its samples.

    Args:
        predictions: an answer for each sample.
        answers: those of each sample.

    Raises:
        ValueError: as `score`, or if there is nothing to score, or not one of `answers` for each prediction.
    """
    if not predictions or len(predictions) != len(answers):
        raise ValueError(
            f"`predictions` and `answers` must be one for each sample, got {len(predictions)} and {len(answers)}"
        )
    return round(100 * sum(map(score, predictions, answers)) / len(predictions), 2)
