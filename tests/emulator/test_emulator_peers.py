"""The emulator: the order of accesses to peers in a cluster, given by its barriers and by barriers in shared memory."""

from __future__ import annotations

import pytest
from emulated_calls import needs_emulator
from test_emulator import run_broken

from ssmgen.emulator import EmulatorError

pytestmark = needs_emulator

# A warp gives its number to the next block's array, and tells another by a barrier in shared memory, once it has waited for the cluster.
TELLS = """
  SHARED(float, number, 1);
  SHARED(unsigned long long, told, 1);
  if (threadIdx.x == 0) barrier_init(told, 0, 1);
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) store_to_peer(number, 0, 1 - blockIdx.x % 2, float(blockIdx.x + 1));
  cluster_arrive();
  if (threadIdx.x < 32) {
    cluster_wait();
    if (threadIdx.x == 0) barrier_arrive(told, 0);
  } else {
    barrier_wait(told, 0, 0);
    if (threadIdx.x == 32) store_u32(data + blockIdx.x * 64, __float_as_uint(number[0]));
    cluster_wait();
  }
"""


def test_what_peers_have_done_is_told():
    assert run_broken(TELLS, grid=2, cluster=2)[:2, 0].tolist() == [2, 1]
    early = TELLS.replace("    cluster_wait();\n    if (threadIdx.x == 0) barrier", "    if (threadIdx.x == 0) barrier")
    early = early.replace("arrive(told, 0);\n", "arrive(told, 0);\n    cluster_wait();\n")
    with pytest.raises(EmulatorError, match=r"number\[0\] in shared memory, which"):
        run_broken(early, grid=2, cluster=2)
