"""SIGTERM and SIGUSR1 under a trainer. The tests in cmd check that no step is lost."""

import http.server
import os
import signal
import socketserver
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest

from launch import Launches


class Signals(Launches):
    SHOW = """
        import faulthandler, multiprocessing, signal, subprocess
        def actions():
            now = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
            return [action.__name__ if callable(action) else str(int(action)) for action in now]
        def caught(pid="self"):
            with open(f"/proc/{pid}/status") as file:
                mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
            return [bool(mask >> s - 1 & 1) for s in (signal.SIGTERM, signal.SIGUSR1)]
    """

    def shown(self, source: str, *flags: str, code: int = 0) -> list[object]:
        return self.trained(1, textwrap.dedent(self.SHOW) + textwrap.dedent(source), *flags, code=code)

    def test_they_are_held_from_the_first_call_to_close(self) -> None:
        heard = self.shown("""
            import ckptstore._signals
            emit([actions(), caught()])
            current()
            emit([actions(), caught()])
            ckptstore.close()
            emit([actions(), caught(), "CKPTSTORE_SIGNALS" in os.environ])
            ckptstore.report({"loss": 1})
            emit(caught())
        """)
        self.assertEqual(heard, [[["0", "0"], [False] * 2], [["_received"] * 2, [True] * 2], [["0", "0"], [False] * 2, False], [True] * 2])

    def test_the_thread_of_a_connection_that_was_closed_leaves_the_next_alone(self) -> None:
        heard = self.shown("""
            from ckptstore._signals import _Hold
            import threading
            gate, release = threading.Event(), _Hold.release
            def late(hold):
                if threading.current_thread() is not threading.main_thread():
                    gate.wait(30)
                release(hold)
            _Hold.release = late
            current()
            old = [t for t in threading.enumerate() if t.name == "ckptstore signals"]
            ckptstore.close()
            ckptstore.report({"loss": 1})
            gate.set()
            for thread in old:
                thread.join(30)
            emit([len(old), [t.is_alive() for t in old], caught()])
        """)
        self.assertEqual(heard, [[1, [False], [True] * 2]])

    def test_children_have_the_default_actions(self) -> None:
        heard = self.shown("""
            def child(results):
                ckptstore.context()  # as the same rank
                results.put([actions(), caught()])
                time.sleep(1000)
            if __name__ == "__main__":
                current()
                for how in ("fork", "spawn"):
                    context = multiprocessing.get_context(how)
                    results = context.Queue()
                    process = context.Process(target=child, args=(results,))
                    process.start()
                    emit(results.get())
                    process.terminate()
                    process.join()
                    emit(process.exitcode)
                read, write = os.pipe()
                def from_a_thread():
                    pid = os.fork()
                    if pid == 0:
                        os.write(write, json.dumps([actions(), caught()]).encode())
                        os._exit(0)
                    os.waitpid(pid, 0)
                thread = threading.Thread(target=from_a_thread)
                thread.start()
                thread.join()
                emit(json.loads(os.read(read, 100)))
                again = subprocess.Popen([sys.executable, "-c", "import ckptstore, time; ckptstore.context(); print(flush=True); time.sleep(1000)"], stdout=subprocess.PIPE)
                again.stdout.readline()  # it is connected as the same rank
                emit(caught(again.pid))
                again.terminate()
                emit(again.wait())
                emit(actions())
        """)
        default = [["0", "0"], [False] * 2]
        self.assertEqual(heard, [default, -15, default, -15, default, [False] * 2, -15, ["_received"] * 2])

    def test_what_the_script_has_done_stays(self) -> None:
        heard = self.shown("""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            faulthandler.register(signal.SIGUSR1)  # of which Python's table does not know
            current()
            emit([actions(), caught()])
            os.kill(os.getpid(), signal.SIGTERM)
            ckptstore.close()
            emit([actions(), caught()])
        """)
        self.assertEqual(heard, [[["1", "0"], [False, True]]] * 2)

    def test_what_the_script_does_later_stays(self) -> None:
        heard = self.shown("""
            def own(number, frame):
                emit("own")
            current()
            signal.signal(signal.SIGTERM, own)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            ckptstore.report({"loss": 1})
            emit(actions())
            ckptstore.close()
            emit(actions())
        """)
        self.assertEqual(heard, [["own", "0"]] * 2)

    def test_another_thread_leaves_it_to_the_main_thread(self) -> None:
        heard = self.shown("""
            thread = threading.Thread(target=current)
            thread.start()
            thread.join()
            emit(caught())
            current()
            emit(caught())
        """)
        self.assertEqual(heard, [[False] * 2, [True] * 2])

    def test_a_signal_asks_to_stop(self) -> None:
        heard = self.shown("""
            step = 0
            ckptstore.report({"loss": 1})
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            while not (why := ckptstore.report({"loss": 1})):
                step += 1
            current().wait(save(current(), 10**6, b"a" * 16).checkpoint, "committed")
            emit(why)
        """, code=75)
        self.assertEqual(heard, ["preempt"])
        self.assertIn("rank 0 received SIG", self.output)

    def test_stacks_of_a_rank_that_hangs(self) -> None:
        self.shown("""
            def hangs_here():
                time.sleep(1000)
            ckptstore.report({"loss": 1})
            hangs_here()
        """, "--hang-timeout", "1s", code=1)
        self.assertIn("in hangs_here", self.output)

    def test_an_agent_ends_nobody(self) -> None:
        heard = self.program("""
            import signal
            ckptstore.report({"loss": 1}, 1)
            emit([int(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGUSR1)])
        """)
        self.assertEqual(heard, [[0, 0]])

    def test_a_warning_does_not_end_an_agent(self) -> None:
        heard = self.program("""
            import signal, subprocess
            session = current()
            status = json.loads(subprocess.run([os.environ["CKPTSTORE_BIN"], "agent", "status", "--store", os.environ["CKPTSTORE_STORE"], "--json"], check=True, capture_output=True).stdout)
            os.kill(status["pid"], signal.SIGUSR1)
            time.sleep(0.1)
            emit(session.wait(save(session, 1, b"a" * 16).checkpoint, "committed"))
        """)
        self.assertEqual(heard, ["committed"])

    def test_data_loaders_can_ignore_them(self) -> None:
        heard = self.shown("""
            current()
            def loads():
                ckptstore.ignore_stop_signals(0)
                emit(actions())
                time.sleep(1000)
            process = multiprocessing.get_context("fork").Process(target=loads)
            process.start()
            while True:
                with open(f"/proc/{process.pid}/status") as file:
                    if next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn")) >> 14 & 1:
                        break
            process.terminate()
            process.join(0.5)
            emit(process.is_alive())
            process.kill()
        """)
        self.assertEqual(heard, [["1", "1"], True])


class TermBeforeRelease(unittest.TestCase):
    """A trainer sends SIGTERM to a rank before it reads the hold_signals of that rank, and replies afterwards."""

    RANK = """
        import os, select, signal, sys, time
        from ckptstore import _signals
        release = _signals._Hold.release
        def caught_first(held):
            if not held.released:  # the thread has looked for signals and found the answer alone
                os.kill(os.getpid(), signal.SIGTERM)
                select.select([held._reader], [], [])
            release(held)
        _signals._Hold.release = caught_first
        _signals.hold(sys.argv[1], "")
        time.sleep(60)
    """

    def test_the_rank_ends(self) -> None:
        class Trainer(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def address_string(self) -> str:
                return "rank"

            def log_message(self, *_: object) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        with tempfile.TemporaryDirectory() as folder, Server(path := os.path.join(folder, "s"), Trainer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                ended = subprocess.run([sys.executable, "-c", textwrap.dedent(self.RANK), path], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=30)
                self.assertEqual(ended.returncode, -signal.SIGTERM)
            finally:
                server.shutdown()
