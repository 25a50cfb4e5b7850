"""The steps of a pipeline that come before and after reinforcement learning."""
