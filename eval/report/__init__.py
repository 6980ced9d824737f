"""Reports: saved runs as the paper's tables and figures, by `write.write_report` or `dustin-hf report`.

- Tables 1, 6, 7: LongBench runs (`accuracy`). 8: the same beside the lossless run; SmallKV, which the paper compares
  with there, is not among our methods. 3, 14: the variants T, D and H of one budget, where there is a lossless run.
- Tables 2, 9, 10, 11 and figure 1: results of `bench decode` (`decoding`); 9 are the rows of the arms `specattn` and
  `dustin`.
- Figures 7, 8, 10: results of `bench kernels` and `bench overhead` (`attention`).
- RULER-style runs, ours: `needles`.
- Perplexity and drift on books (section 5.3.2): `pg19` runs (`books`).
- Table 4 and figures 2, 3, 4, 9, 11, 12, 13: fidelity runs and studies (`recovery`), drawn by
  `dustin_hf.profiling.plots`, which says how they differ from the paper's.

No counterpart in our data: table 5, whose drafts and depths are in every caption instead; 12 and 13, since a study that
was interrupted has no times of all its phases (`times.json` holds those of its last call). Figures 5 and 6 are drawings
of the method.
"""
