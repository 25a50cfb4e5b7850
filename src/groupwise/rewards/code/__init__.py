"""Rewards for programs, judged by running them in a sandbox.

The program is hostile: it may replace every object of its own process, including the code that
answers the judge, and send any bytes at any time. **Nothing that decides a verdict comes from it.**

* A test is data. Which of its names the program supplies is decided by the tests alone
  (`suite.py`), each is asked for by itself, and the answer is bound to that name and no other.
  Builtins, modules of the standard library and whatever the tests define are the judge's own.
* What arrives is data of exact types, built by the judge, or a handle. A message that is not one of
  the three that a program may send ends the program, for good.
* Comparing a handle with data is never left to the program, nor is the result of arithmetic between
  the two. Its exception classes never catch a failed assertion of the test.
* "Cannot be judged" follows from the tests, before the program runs, or from an object of their own
  that a test hands over. Whatever the program does, its reward is 0 at worst, and never none.

What a program says of its own objects (two of them are equal, one is true) is its own answer, like
the value of a call: a test that relies on nothing else can be met by guessing.
"""
