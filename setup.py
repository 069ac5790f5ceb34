"""The one part that is compiled: kernels of the progressive search. Without a compiler, NumPy does their work."""

from setuptools import Extension, setup

KERNELS = Extension(
    "adanpc.index._kernels",
    ["src/adanpc/index/_kernels.c"],
    extra_compile_args=[
        "-O3",
        "-fno-math-errno",
        "-ffp-contract=off",
    ],  # no fused operations: every path gives the same bits
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[KERNELS], options={"bdist_wheel": {"py_limited_api": "cp311"}})
