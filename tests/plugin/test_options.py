"""The --kt-* options: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from kt_kernel.serving.flags import add_arguments, collect, from_environment, restore_defaults
from kt_kernel.serving.option_table import OPTIONS, OptionError
from kt_kernel.serving.options import KTOptions

SPECIFIED = [
    "--kt-method",
    "--kt-weight-path",
    "--kt-cpuinfer",
    "--kt-threadpool-count",
    "--kt-numa-nodes",
    "--kt-num-gpu-experts",
    "--kt-gpu-experts-ratio",
    "--kt-gpu-experts-memory",
    "--kt-gpu-experts-mask",
    "--kt-hot-format",
    "--kt-max-deferred-experts-per-token",
    "--kt-gpu-prefill-token-threshold",
    "--kt-gpu-prefill-memory",
    "--kt-expert-placement-strategy",
    "--kt-expert-stats",
    "--record-kt-gpu-expert-distribution",
    "--record-kt-expert-routes",
    "--kt-expert-routes-tokens",
    "--kt-enable-dynamic-expert-update",
    "--kt-expert-update-rate",
    "--kt-expert-lora-path",
    "--kt-allow-untested",
    "--kt-tuned",
]
NOT_YET = [option for option in OPTIONS if not option.supported]


def test_every_specified_flag_is_known() -> None:
    assert {option.flag for option in OPTIONS} == set(SPECIFIED)


def test_nothing_given() -> None:
    options = KTOptions.from_mapping({})
    assert options == KTOptions() and options.to_mapping() == {}
    assert options.method == "auto" and KTOptions.from_mapping({"method": "auto"}) == options
    assert options.hot_count(8) == 0
    assert options.describe().count("(not given)") == 4


def test_round_trip(tmp_path: Path) -> None:
    given = {
        "method": "INT4_G32",
        "weight_path": str(tmp_path),
        "cpuinfer": 4,
        "threadpool_count": 2,
        "num_gpu_experts": 0,
        "max_deferred_experts_per_token": 1,
        "expert_lora_path": str(tmp_path),
        "gpu_prefill_token_threshold": "auto",
        "gpu_prefill_memory": 1 << 30,
        "allow_untested": True,
    }
    options = KTOptions.from_mapping(given)
    assert options.to_mapping() == given
    assert KTOptions.from_mapping(json.loads(json.dumps(options.to_mapping()))) == options
    assert "\n" not in options.describe()


@pytest.mark.parametrize("name", ["num_gpu_experts", "kt_num_gpu_experts", "--kt-num-gpu-experts"])
@pytest.mark.parametrize("value", [3, "3"])
def test_spellings(name: str, value: Any) -> None:
    assert KTOptions.from_mapping({name: value}).num_gpu_experts == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "AMXINT9"},
            "--kt-method AMXINT9: unknown method; accepted: auto, BF16",
        ),
        ({"method": 4}, "--kt-method 4: expected text"),
        ({"cpuinfer": 0}, "--kt-cpuinfer 0: expected an integer of at least 1"),
        ({"cpuinfer": "many"}, "--kt-cpuinfer many: expected an integer of at least 1"),
        ({"cpuinfer": 2.0}, "--kt-cpuinfer 2.0: expected an integer"),
        ({"cpuinfer": True}, "--kt-cpuinfer True: expected an integer"),
        ({"cpuinfer": 10**12}, "--kt-cpuinfer 1000000000000: expected an integer"),
        ({"num_gpu_experts": -1}, "--kt-num-gpu-experts -1: expected an integer of at least 0"),
        ({"num_gpu_experts": [1]}, r"--kt-num-gpu-experts \[1\]: expected an integer"),
        ({"max_deferred_experts_per_token": "-2"}, "-2: expected an integer of at least 0"),
        ({"weight_path": "/no/such/folder"}, "--kt-weight-path /no/such/folder: no such file"),
        ({"weight_path": "a\0b"}, "--kt-weight-path .*: no such file"),
        ({"weight_path": ""}, "--kt-weight-path : no such file"),
        ({"expert_lora_path": "nothing"}, "--kt-expert-lora-path nothing: no such file or folder"),
        ({"weight_path": "nothing"}, "no such file or folder, and not a repository name"),
        ({"allow_untested": "yes"}, "--kt-allow-untested 'yes': expected true or false"),
        ({"cpuinfer": 1, "threadpool_count": 2}, "fewer threads than pools; accepted: at least"),
        ({"methods": "BF16"}, "unknown kt option 'methods'; accepted: method, "),
        ({"method": "BF16", "kt_method": "BF16"}, "--kt-method is given twice"),
        ({"gpu_prefill_token_threshold": -1}, "threshold -1: expected an integer of at least 0"),
        *(
            (
                {"gpu_prefill_memory": size, "gpu_prefill_token_threshold": 1},
                "--kt-gpu-prefill-memory .*: expected a size in MB or GB, such as 1536MB or 2GB",
            )
            for size in (
                "1",
                "-1GB",
                "0MB",
                "1 TB",
                "GB",
                0,
                -5,
                1.5,
                True,
                "9" * 400 + "GB",
                1 << 50,
            )
        ),
        (
            {"gpu_experts_ratio": 10**400},
            "--kt-gpu-experts-ratio 10*: expected a number from 0 to 1",
        ),
        (
            {"gpu_prefill_memory": "1GB", "gpu_prefill_token_threshold": 0},
            "with --kt-gpu-prefill-token-threshold 0 no expert is copied",
        ),
        (["method"], "expected a mapping of option names to values"),
    ],
)
def test_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        KTOptions.from_mapping(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "megabytes"), [("1536MB", 1536), ("2GB", 2048), (" 1.5 GB", 1536), (1 << 20, 1)]
)
def test_sizes(size: Any, megabytes: int) -> None:
    options = KTOptions.from_mapping(
        {"gpu_prefill_memory": size, "gpu_prefill_token_threshold": "512"}
    )
    assert options.gpu_prefill_memory == megabytes << 20
    assert "experts streamed from 512 tokens on" in options.describe()


@pytest.mark.parametrize("option", NOT_YET, ids=lambda option: option.name)
def test_not_yet_supported(option: Any) -> None:
    value = True if option.kind == "flag" else "1"
    with pytest.raises(OptionError, match=f"{option.flag} is not supported by this version: "):
        KTOptions.from_mapping({option.name: value})


def test_more_hot_experts_than_there_are() -> None:
    options = KTOptions(num_gpu_experts=9)
    assert options.hot_count(9) == 9
    with pytest.raises(OptionError, match="--kt-num-gpu-experts 9: the model has 8 .* 0 to 8"):
        options.hot_count(8)


@pytest.mark.parametrize("path", ["org/name", "org/name@v1", "org/name/file.gguf"])
def test_a_repository(path: str) -> None:
    """Whether there is one is not asked while the command line is parsed."""
    assert KTOptions.from_mapping({"weight_path": path}).weight_path == path


def test_weight_path_that_cannot_be_looked_at() -> None:
    """Path.exists raises for these; the error still names the flag."""
    with pytest.raises(OptionError, match="--kt-weight-path /xxx.*: File name too long"):
        KTOptions.from_mapping({"weight_path": "/" + "x" * 300})


# ---- the command line


def parser_of_an_engine() -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """A parser that has two of the flags already, with defaults and choices of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kt-method", default="AMXINT4", choices=["AMXINT4"], help="theirs")
    parser.add_argument("--kt-threadpool-count", type=int, default=2)
    parser.add_argument("--kt-enable-dynamic-expert-update", action="store_true")
    return parser, add_arguments(parser)


def test_nothing_on_the_command_line() -> None:
    parser, replaced = parser_of_an_engine()
    namespace = parser.parse_args([])
    assert collect(namespace) == {}
    restore_defaults(namespace, replaced)
    assert namespace.kt_method == "AMXINT4" and namespace.kt_threadpool_count == 2
    assert namespace.kt_enable_dynamic_expert_update is False


def test_a_value_equal_to_the_default_of_the_engine_is_given() -> None:
    parser, replaced = parser_of_an_engine()
    namespace = parser.parse_args(["--kt-method", "AMXINT4", "--kt-num-gpu-experts", "3"])
    assert collect(namespace) == {"method": "AMXINT4", "num_gpu_experts": 3}
    assert "theirs" not in parser.format_help() and "(default auto: " in parser.format_help()
    restore_defaults(namespace, replaced)
    assert namespace.kt_method == "AMXINT4" and namespace.kt_threadpool_count == 2


def test_flags_without_value() -> None:
    parser, _ = parser_of_an_engine()
    assert collect(parser.parse_args(["--kt-allow-untested"])) == {"allow_untested": True}


@pytest.mark.parametrize("make", [parser_of_an_engine, lambda: _own_parser()])
@pytest.mark.parametrize(
    ("values", "want"),
    [
        *(([], "on"), (["on"], "on"), (["auto"], "auto"), (["off"], "off")),
        *((["true"], "on"), (["false"], "off")),  # as SGLang passes YAML's on and off
    ],
)
def test_a_switch(make: Any, values: list[str], want: str) -> None:
    """Bare it means on, also where an engine has a flag of this name without a value."""
    flag = "--kt-enable-dynamic-expert-update"
    given = collect(make()[0].parse_args([flag, *values, "--kt-num-gpu-experts", "2"]))
    options = KTOptions.from_mapping(given)
    assert options.enable_dynamic_expert_update == want
    assert options.moves_experts == (want != "off")
    assert KTOptions.from_mapping({"enable_dynamic_expert_update": True, "num_gpu_experts": 2})
    with pytest.raises(SystemExit, match=f"{flag} maybe: expected auto, on, off"):
        make()[0].parse_args([flag, "maybe"])


@pytest.mark.parametrize("negated", [True, False])
def test_negated_switches(negated: bool) -> None:
    """SGLang before 0.5.23 refuses a YAML file with a switch that has two flags."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, negated=negated)
    for option in OPTIONS:
        flags = [action for action in parser._actions if action.dest == option.dest]
        assert len(flags) == (2 if negated and option.kind == "switch" else 1), option


def _own_parser() -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    return parser, add_arguments(parser)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "update on: no expert is hot; add --kt-num-gpu-experts"),
        ({"num_gpu_experts": 0}, "update on: no expert is hot"),
        (
            {"num_gpu_experts": 2, "expert_lora_path": "org/name"},
            "update on and --kt-expert-lora-path org/name: not supported together",
        ),
        (
            {"enable_dynamic_expert_update": "off", "expert_update_rate": "8GB"},
            "--kt-expert-update-rate: without --kt-enable-dynamic-expert-update",
        ),
        ({"enable_dynamic_expert_update": 3}, "update 3: expected auto, on, off"),
    ],
)
def test_what_cannot_move(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        KTOptions.from_mapping({"enable_dynamic_expert_update": "on"} | given)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kt-method", "NOPE"],
        ["--kt-threadpool-count", "0"],
        ["--kt-cpuinfer", "x"],
        ["--kt-weight-path", "/no/such/folder"],
        ["--kt-gpu-experts-ratio", "2"],
    ],
)
def test_wrong_value_ends_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser, _ = parser_of_an_engine()
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert str(caught.value.code).startswith(f"kt: error: {arguments[0]} ")
    assert "\n" not in str(caught.value.code)
    assert capsys.readouterr().err == ""  # no usage page before it


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help(option: Any) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert option.flag in parser.format_help()


# ---- the environment


def test_environment() -> None:
    assert from_environment({}) is None and from_environment({"KT_CONFIG": ""}) is None
    assert from_environment({"KT_CONFIG": "{}"}) == {}  # given, with all options at their defaults
    assert from_environment({"KT_CONFIG": '{"method": "BF16"}'}) == {"method": "BF16"}


@pytest.mark.parametrize("text", ["{", "[1]", "BF16", 100_000 * "["])
def test_environment_that_is_no_object(text: str) -> None:
    with pytest.raises(OptionError, match="KT_CONFIG .*JSON"):
        from_environment({"KT_CONFIG": text})
