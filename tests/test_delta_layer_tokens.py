"""gdn_layer and kda_layer of several tokens: the same bits as the operators that they are made of; what is wrong with a call; specs."""

from __future__ import annotations

from layer_cases import GDN_TOKENS, KDA_TOKENS, differing, emulate, emulated_chain, make, named, needs_emulator

CASES = [*GDN_TOKENS, *KDA_TOKENS]


@named(CASES)
def test_a_call_on_cpu_equals_the_separate_operators(case):
    call, chain = make(case), make(case).chain()
    for _ in range(2 if case.accepted is None else 1):
        assert call.run() is call.kwargs["out"]
    if case.accepted is None:
        chain.chain()
    call.assert_unharmed()
    assert not differing(call, chain)


@needs_emulator
@named(CASES)
def test_kernels_equal_those_of_the_separate_operators(case):
    chain, call = emulated_chain(case), make(case)
    emulate(call.built())
    call.assert_unharmed()
    assert not differing(call, chain)
