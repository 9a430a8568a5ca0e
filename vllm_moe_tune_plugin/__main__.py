"""``python -m vllm_moe_tune_plugin``: the command ``vllm-moe-tune``."""

from vllm_moe_tune_plugin.cli import main

main(prog_name="vllm-moe-tune")
