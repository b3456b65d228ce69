"""What several tests of running models share: kernel sets, parametrizations, and comparing generations."""

import pytest
import tiny_models as tiny

from pycass._pycass import ffi, lib


def kernel_sets():
    """Names of the kernel sets that run here, best first."""
    found, runs = [], ffi.new("int *")
    while (name := lib.pycass_kernel_name(len(found), runs)) != ffi.NULL:
        found.append((ffi.string(name).decode(), runs[0]))
    return [name for name, ok in found if ok]


KERNELS = kernel_sets()
each_model = pytest.mark.parametrize("name", tiny.SPECS)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def seen(completion):
    """What has to be equal whenever the same model continues the same prompt."""
    return completion.token_ids, completion.logits_hash, completion.logprobs, completion.text, completion.finish_reason
