"""The thread pools under the name that users' scripts import; the code is in
`kt_kernel.runtime.pools`."""

from kt_kernel.runtime.machine import usable_cores
from kt_kernel.runtime.pools import PoolPlan, plan_pools

__all__ = ["PoolPlan", "plan_pools", "usable_cores"]
