"""Measure on the user's GPU what the tunings give: ``vllm-moe-tune bench``.

* ``layer``: one MoE layer through vLLM's own experts, stock and tuned, by replay of CUDA graphs (:mod:`.layer`);
* ``engine``: vLLM's own benchmarks, stock and tuned in turn, each in an engine of its own (:mod:`.engine`);
* ``report``: tables, plots and a page from the files that the two write (:mod:`.report`, :mod:`.schema`).
"""
