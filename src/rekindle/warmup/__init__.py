"""Before the first request: kernels are compiled ahead, steps are recorded and run once.

compile_ahead   while weights load, another process compiles the kernels of a stage into Triton's cache
compiler          that process: runs every step shape over a model without memory and compiles what is launched
launches            notes Triton launches instead of running them; worker processes that compile
outline             the model without memory
steps, cold_experts   the step shapes
steps.warm_up   when the weights are there: records the stage's graphs and runs what is not recorded once
"""
