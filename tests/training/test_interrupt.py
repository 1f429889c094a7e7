"""Ctrl-C waits for the end of a step, also if it comes where Python drops exceptions."""

import signal
import subprocess
import sys
import threading

import pytest

from scalewise.training import _console as _interrupt
from scalewise.training._console import held_interrupts, signal_of


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """A gate that a shell started in the background ignores signals, and so would we."""
    default = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    default[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in default.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # what is raised in here is printed and forgotten


def test_a_step_is_finished_before_the_interrupt():
    steps = []

    def run():
        with held_interrupts() as check_interrupt:
            for step in range(5):
                check_interrupt()
                if step == 2:
                    Collected()
                steps.append(step)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_wait_too(number):
    def run():
        with held_interrupts() as check_interrupt:
            signal.raise_signal(number)
            signal.raise_signal(number)
            check_interrupt()

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert signal_of(caught.value) == number
    assert signal_of(KeyboardInterrupt()) == signal.SIGINT
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_interrupt_does_not_wait():
    came = []

    def run():
        with held_interrupts():
            for i in range(3):
                signal.raise_signal(signal.SIGINT)
                came.append(i)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert came == [0]


def test_an_existing_handler_stays():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with held_interrupts() as check_interrupt:
        signal.raise_signal(signal.SIGINT)
        check_interrupt()
    assert heard == [1]


def test_a_thread_delays_no_signal():
    raised = []

    def run():
        try:
            with held_interrupts() as check_interrupt:
                check_interrupt()
        except ValueError as error:  # signals can't be set there
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not raised


FORKED = """
import os, runpy, signal, sys, time

with runpy.run_path(sys.argv[1])["held_interrupts"]():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_can_be_terminated():
    command = [sys.executable, "-c", FORKED, _interrupt.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout == f"{-signal.SIGTERM}\n"
