# Environments are made on first use, outside the checkout, and reused: see .ci/env.sh.
# ARGS is passed on: make test-core ARGS="-k placement -x", make demo ARGS=--help
.DEFAULT_GOAL := help
.PHONY: help demo demo-sft test test-core test-engines test-full lint format wheel bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo: ## serve the small model of the package with vLLM on the CPU and complete one prompt
	@python=$$(.ci/env.sh vllm) && "$$python" -m kt_kernel.demo $(ARGS)

demo-sft: ## tune the small model on a play for some minutes, and serve it with vLLM
	@python=$$(.ci/env.sh vllm) && "$$python" -m kt_kernel.demo_sft --output build/demo-sft $(ARGS)

test: ## all tests, both engines included
	@.ci/test all $(ARGS)

test-core: ## the tests that need no engine
	@.ci/test core $(ARGS)

test-engines: ## the tests that run vLLM and SGLang
	@.ci/test engines $(ARGS)

test-full: ## all tests, with whole grids of cases and long fuzzing: before a release, about an hour
	@.ci/test full $(ARGS)

lint: ## ruff, clang-format, import rules, types
	@.ci/lint

format: ## rewrite the sources as lint wants them
	@.ci/lint fix

wheel: ## build the wheel; prints its path
	@.ci/env.sh wheel

bench: ## measure the kernels on this machine (ARGS="--budget 8 --json FILE"; docs/performance.md)
	@python=$$(.ci/env.sh core) && "$$python" benchmarks/run.py $(ARGS)

clean: ## remove build output here, and environments this checkout's pins no longer name
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
	@.ci/env.sh prune
