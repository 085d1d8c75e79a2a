# SPDX-License-Identifier: Apache-2.0
"""A failure on a backend says how to repeat it: kernel, shape, schedule, seed."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        for calls in (value for name, value in item.user_properties if name == "calls"):
            if hasattr(report.longrepr, "addsection"):
                report.longrepr.addsection("repro", "\n".join(calls))
    return report
