"""What depends on tritonserver itself.

An entry of `installation.TRITON_RELEASES` holds what differs between Triton releases. What is the same in all of them
is in one file for each subject::

    installation    the known releases; where tritonserver is, and what it needs
    command_line    its options, and how a secret is erased from them
    control         the HTTP API that loads and unloads models
    stubs           the processes of its Python models
    error_messages  the words of its error messages

`serving.log` reads its log. Each of these says which Triton releases it was run with, and for which releases their
source was read. To support another release, add its entry and check those files.
"""
