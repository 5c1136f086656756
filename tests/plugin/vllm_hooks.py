"""Runs in the vLLM environment without an engine: checks what a run on the CPU does not show.

Prints OK at the end. An assertion names what is wrong.
"""

import vllm_contract_checks as contract
import vllm_delivery_checks as delivery
import vllm_packed_checks as packed
import vllm_padding_checks as padding

if __name__ == "__main__":
    contract.check_nothing_is_installed_without_options()
    contract.check_a_wrong_value_ends_the_command_line()
    contract.check_the_table()
    contract.check_configurations()
    contract.check_how_a_draft_model_is_loaded()
    contract.check_an_empty_quantization_config()
    contract.check_layers_are_refused()
    contract.check_other_experts()
    contract.check_hot_experts_without_a_gate()
    contract.check_hot_experts_with_a_limit()
    delivery.check_hot_experts_are_delivered()
    contract.check_sums_left_to_the_model_are_refused()
    contract.check_a_renamed_function_stops_a_start()
    contract.check_workers_without_the_plugin_stop_a_start()
    contract.check_requests()
    contract.check_the_longest_context()
    contract.check_the_largest_cuda_graph()
    contract.check_changes_of_a_configuration()
    padding.check_slots()
    padding.check_what_the_runner_marks()
    padding.check_what_is_not_taken()
    padding.check_layers_pass_it_on()
    padding.check_which_batches_are_sorted()
    padding.check_kernels_that_compute_every_route()
    packed.check_blocks_of_packed_experts()
    print("OK")
