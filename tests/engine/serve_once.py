"""Serve a few prompts of token ids with a whole vLLM engine and write what came out as JSON.

Usage: serve_once.py REQUEST.json RESULT.json
"""

import json
import os
import sys
from pathlib import Path


def main(request_file: str, result_file: str) -> None:
    # Imported here: vLLM's spawned processes import this file again, and only the guarded call below starts an engine.
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text())
    engine = LLM(
        request["model"],
        dtype="float32",
        seed=0,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=32,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        disable_log_stats=True,
        moe_backend="triton",
    )
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
        [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=1)
            for length in request["lengths"]
        ],
        use_tqdm=False,
    )
    completions = []
    for answer in answers:
        output = answer.outputs[0]
        tokens = list(output.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]
        completions.append({"tokens": tokens, "logprobs": logprobs})
    Path(result_file).write_text(json.dumps({"pid": os.getpid(), "completions": completions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
