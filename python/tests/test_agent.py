"""Programs without a trainer."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile

from launch import CKPTSTORE, DEADLINE, Launches, emitted

SAVES = """
    session = current()
    slot = save(session, int(sys.argv[1]), b"a" * 16)
    emit([session.context.run, session.context.attempt, session.context.rank, session.context.world_size, session.context.resume, slot.checkpoint])
"""


class Agents(Launches):
    def committed(self) -> list[str]:
        done = self.ckptstore("ls", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_program_and_the_next_one(self) -> None:
        # Neither program waits for its save: the agent finishes staged saves.
        self.assertEqual(self.program(SAVES, "1"), [["train", 1, 0, 1, None, "step-1.a1"]])
        self.assertEqual(self.program(SAVES, "2"), [["train", 2, 0, 1, "step-1.a1", "step-2.a2"]])
        self.until("the second is committed", lambda: "step-2.a2" in self.committed())

    def test_two_programs_of_one_script_at_once(self) -> None:
        """The second program gets its own run; a third must choose one to continue."""
        source = SAVES + """
    session.wait(slot.checkpoint, "committed")
    child = os.fork()
    if child == 0:
        emit(current().context.run)
        os._exit(0)
    os.waitpid(child, 0)
    emit([ckptstore._connect.deciding(None, session.context.run) is session.wire, current() is session])
    while sys.argv[1] == "1" and not os.path.exists("continue"):
        time.sleep(0.05)
"""
        first = self.start(source, "1")
        self.until("the first has saved", lambda: "step-1.a1" in self.ckptstore("ls", "--json").stdout)
        second = self.start(source, "2")
        out, err = second.communicate(timeout=DEADLINE)
        open(os.path.join(self.folder, "continue"), "w").close()
        self.assertEqual(self.heard(first)[1:], ["train", [True, True]])
        self.assertEqual(emitted(out), [["train-2", 1, 0, 1, None, "step-2.a1"], "train-2", [True, True]], err)
        self.assertIn("ckptstore: run train is in use by another process: this one's is train-2; name runs by CKPTSTORE_RUN", err)
        third = self.start(SAVES, "3")
        _, err = third.communicate(timeout=DEADLINE)
        self.assertIn("train (step 1), train-2 (step 2): choose one to continue, by CKPTSTORE_RUN=train or", err)
        self.assertEqual(self.program(SAVES, "3", CKPTSTORE_RUN="train-2"), [["train-2", 2, 0, 1, "step-2.a1", "step-3.a2"]])
        self.assertEqual(self.program(SAVES, "3", CKPTSTORE_RESUME="none"), [["train", 2, 0, 1, None, "step-3.a2"]])

    def test_ranks_join_one_session(self) -> None:
        heard = [self.heard(rank) for rank in self.ranks(2, SAVES, "1")]
        self.assertEqual(heard, [[["train", 1, 0, 2, None, "step-1.a1"]], [["train", 1, 1, 2, None, "step-1.a1"]]])
        # The same variables again, as of torchrun without a rendezvous: another launch.
        heard = [self.heard(rank) for rank in self.ranks(2, SAVES, "2")]
        self.assertEqual([values[0][1] for values in heard], [2, 2])

    def test_ranks_on_two_machines(self) -> None:
        """Each machine has an agent of its own; here, a runtime directory of its own."""
        there = tempfile.mkdtemp(prefix="ck", dir="/tmp")  # short enough for sockets
        self.addCleanup(shutil.rmtree, there, ignore_errors=True)
        source = SAVES + """
    session.wait(slot.checkpoint, "committed")
    emit(ckptstore.all_gather_object(session.context.rank))
    ckptstore.report({"loss": 1.0})
"""
        machines: list[dict[str, str]] = [{}, {"XDG_RUNTIME_DIR": there}]
        for attempt, resume in ((1, None), (2, "step-1.a1")):
            variables = {
                "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            programs = [self.start(source, str(attempt), RANK=str(rank), **variables, **machines[rank]) for rank in (1, 0)]
            heard = [self.heard(program) for program in reversed(programs)]
            self.assertEqual(heard, [[["train", attempt, rank, 2, resume, f"step-{attempt}.a{attempt}"], [0, 1]] for rank in range(2)])
        status = json.loads(self.ckptstore("agent", "status", "--json").stdout)
        self.assertEqual(len(status["launches"]), 2)

    def test_launches_are_told_apart(self) -> None:
        script = self.script("""
            from ckptstore._identity import identity
            emit([identity().rank, identity().key()])
        """)
        ranks = {rank: self.environment(RANK=str(rank), WORLD_SIZE="2", MASTER_PORT="29500") for rank in range(2)}
        keys = []
        for command, env in (
            ([sys.executable, script], ranks[0]),
            ([sys.executable, script], ranks[1]),
            (["/bin/sh", "-c", f"{sys.executable} {script}; true"], ranks[1]),  # a wrapper of the rank
            (["/bin/sh", "-c", f"RANK=1 WORLD_SIZE=2 MASTER_PORT=29500 {sys.executable} {script}; true"], self.environment()),  # a launcher
            ([sys.executable, script], {**ranks[0], "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "0"}),
            ([sys.executable, script], {**ranks[0], "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "1"}),
            ([sys.executable, script], self.environment()),
            ([sys.executable, script], self.environment()),
        ):
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=True)
            keys.append(emitted(done.stdout)[0][1])
        self.assertEqual(len({keys[0], keys[1], keys[2]}), 1)
        self.assertEqual(len(set(keys[2:])), 6)

    def test_a_rank_that_does_not_join_is_named(self) -> None:
        self.assertEqual(self.ckptstore("agent", "start", "--join-timeout", "2s").returncode, 0)
        heard = self.program("""
            try:
                current()
            except ckptstore.DeadlinePassed as late:
                emit([late.status, str(late)])
        """, RANK="1", WORLD_SIZE="3")
        self.assertEqual(heard[0][0], 504)
        self.assertIn("ranks [0 2] of 3", heard[0][1])

    def test_many_programs_at_once_have_one_agent(self) -> None:
        source = """
            services().call("store/list", all=True)
            from ckptstore import _agent
            emit(_agent.start(os.environ["CKPTSTORE_STORE"], (3,)).pid)
            save(current(), 1, b"a" * 16)
        """
        programs = [self.start(source, CKPTSTORE_RUN=f"run-{number}") for number in range(4)]
        heard = [self.heard(program) for program in programs]
        self.assertEqual(len({values[0] for values in heard}), 1, heard)

    def test_an_agent_that_is_killed(self) -> None:
        heard = [self.heard(rank) for rank in self.ranks(2, """
            from ckptstore import _agent
            session = current()
            first = save(session, 1, b"a" * 16)
            ckptstore.all_gather_object(None)
            if session.context.rank == 0:
                os.kill(_agent.start(os.environ["CKPTSTORE_STORE"], (3,)).pid, 9)
            try:
                while True:
                    session.wire.call("heartbeat")
                    time.sleep(0.01)
            except ckptstore.Unreachable as gone:
                emit("ended" in str(gone))
            again = current()  # all ranks meet again
            emit([again is session, again.context.attempt, again.context.job == session.context.job])
            slot = save(again, 2, b"b" * 16)
            emit([slot.checkpoint, again.wait(slot.checkpoint, "committed"), load(again, slot.checkpoint).decode()])
            services().call("store/list", all=True)
        """)]
        self.assertEqual(heard, [[True, [False, 2, False], ["step-2.a2", "committed", "b" * 16]]] * 2)
        # The next agent has finished the save that all ranks had staged.
        self.assertIn("step-1.a1", self.committed())

    def test_what_becomes_of_a_save_whose_agent_was_killed(self) -> None:
        heard = [self.heard(rank) for rank in self.ranks(2, """
            from ckptstore import _agent
            from ckptstore._outcome import outcome

            def waited(slot, timeout):
                try:
                    return session.wait(slot.checkpoint, "committed")
                except ckptstore.Unreachable as lost:
                    try:
                        return outcome(session, slot.checkpoint, time.monotonic() + timeout, lost)
                    except (ckptstore.SaveAborted, TimeoutError) as error:
                        return type(error).__name__

            session = current()
            first = save(session, 1, b"a" * 16)
            never = save(session, 2, b"b" * 16, seal=session.context.rank == 0)
            ckptstore.all_gather_object(None)
            if session.context.rank == 0:
                os.kill(_agent.start(os.environ["CKPTSTORE_STORE"], (3,)).pid, 9)
                # The other rank has not joined, so what is open stays open.
                emit(waited(never, 3))
                open(sys.argv[1], "w").close()
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.05)
            emit([waited(first, 200), waited(never, 200), current().context.attempt])
        """, os.path.join(self.folder, "waited"))]
        after = ["committed", "SaveAborted", 2]
        self.assertEqual(heard, [["TimeoutError", after], [after]])

    def test_requests_that_need_no_rank_outlive_an_agent(self) -> None:
        heard = self.program("""
            import socket
            from ckptstore import _agent
            wire = services()
            for _ in range(3):
                wire.call("store/list", all=True)
                wire.close()  # in the middle of a request it is Unreachable
                os.kill(_agent.start(os.environ["CKPTSTORE_STORE"], (3,)).pid, 9)
                listening = True
                while listening:
                    with socket.socket(socket.AF_UNIX) as probe:
                        listening = probe.connect_ex(wire.path) == 0
            _agent.start(os.environ["CKPTSTORE_STORE"], (3,))  # by another program, with another token
            emit(wire.call("store/list", all=True).get("error"))
        """)
        self.assertEqual(heard, [None])

    def test_leaving_and_coming_back(self) -> None:
        heard = self.program("""
            save(current(), 1, b"a" * 16)
            ckptstore.close()
            emit("CKPTSTORE_JOINED" in os.environ)
            emit([current().context.attempt, current().context.resume])
            try:
                ckptstore.init(run="other")
            except ckptstore.Error as error:
                emit("close()" in str(error))
            ckptstore.close()
            ckptstore.init(run="other", config={"lr": 0.5})
            emit([ckptstore.context().run, ckptstore.context().config])
        """)
        self.assertEqual(heard, [False, [2, "step-1.a1"], True, ["other", {"lr": 0.5}]])

    def test_a_store_beside_the_default_one(self) -> None:
        heard = self.program("""
            here, there = current(), current(os.environ["CKPTSTORE_STORE"] + "-2", run="side")
            emit([here.context.store != there.context.store, there.context.run, here is current()])
            emit([current(run="third").context.run, current().context.run])
            emit(services(os.environ["CKPTSTORE_STORE"] + "-2").call("store/list", all=True) is not None)
            from ckptstore import _agent
            ckptstore.close()
            os.kill(_agent.start(os.environ["CKPTSTORE_STORE"] + "-2", (3,)).pid, 15)
        """)
        self.assertEqual(heard, [[True, "side", True], ["third", "train"], True])

    def test_a_trainers_own_store_needs_no_agent(self) -> None:
        heard = self.trained(1, """
            store = os.environ["CKPTSTORE_STORE"]
            emit([current(store) is current(), services(store) is current().wire])
        """)
        self.assertEqual(heard, [[True, True]])
        self.assertEqual(self.ckptstore("agent", "status").returncode, 4)

    def test_a_run_without_a_name(self) -> None:
        heard = self.program("""
            sys.argv = [""]
            try:
                current()
            except ckptstore.NoStore as error:
                emit(str(error))
        """)
        self.assertIn("init(run=NAME)", heard[0])

    def failing(self, **env: str) -> str:
        heard = self.program("""
            try:
                services()
            except ckptstore.Error as error:
                emit([type(error).__name__, str(error)])
        """, **env)
        return ": ".join(heard[0])

    def fake(self, script: str) -> str:
        path = os.path.join(self.folder, "ckptstore")
        with open(path, "w") as file:
            file.write("#!/bin/sh\n" + script)
        os.chmod(path, stat.S_IRWXU)
        return path

    def test_the_program_is_missing(self) -> None:
        told = self.failing(CKPTSTORE_BIN="", PATH=self.folder)
        self.assertTrue(told.startswith("NoAgent"), told)
        for part in ("CKPTSTORE_BIN (not set)", os.path.join("ckptstore", "bin", "ckptstore"), self.folder, "install"):
            self.assertIn(part, told)

    def test_the_program_is_found_on_the_path(self) -> None:
        os.symlink(CKPTSTORE, os.path.join(self.folder, "ckptstore"))
        self.assertEqual(self.program("emit(services().path)", CKPTSTORE_BIN="", PATH=self.folder)[0][-10:], "agent.sock")

    def test_the_program_is_no_program(self) -> None:
        told = self.failing(CKPTSTORE_BIN=self.folder)
        self.assertIn("NoAgent", told)
        self.assertIn(self.folder, told)

    def test_a_program_that_is_too_old(self) -> None:
        told = self.failing(CKPTSTORE_BIN=self.fake("""
            if [ "$1" = --version ]; then echo ckptstore 0.0.1; exit; fi
            echo 'ckptstore: unknown command "agent"; see `ckptstore --help`' >&2; exit 2
        """))
        self.assertIn("TooOld", told)
        self.assertIn("ckptstore 0.0.1", told)

    def test_an_agent_of_another_version(self) -> None:
        card = json.dumps({"socket": "/nowhere", "token": "t", "pid": 1, "store": "s", "protocols": [99]})
        told = self.failing(CKPTSTORE_BIN=self.fake(f"echo '{card}'"))
        for part in ("TooOld", "[3]", "[99]", "agent stop"):
            self.assertIn(part, told)

    def test_an_agent_that_cannot_start(self) -> None:
        with open(self.store, "w") as file:
            file.write("no directory")
        told = self.failing()
        self.assertIn("NoAgent", told)
        self.assertIn(self.store, told)
        os.remove(self.store)
        told = self.failing(CKPTSTORE_STORE="/proc/store")
        for part in ("NoAgent", "/proc/store", "init(store="):
            self.assertIn(part, told)

    def test_what_is_not_there_is_said_with_what_is_near(self) -> None:
        os.mkdir(os.path.join(self.folder, "step-10"))
        heard = self.program("""
            from ckptstore._checkpoint import reference
            session = current()
            session.wait(save(session, 100, b"a" * 16).checkpoint, "committed")
            answers = []
            for attempt in (
                lambda: services().call("store/fs/open", path="train/step-10/.metadata"),
                lambda: services().call("store/fs/stat", path="trian/step-10"),
                lambda: load(session, os.path.abspath("step-11")),
                lambda: load(session, os.path.abspath("nowhere/step-10")),
                lambda: ckptstore.open("./step-11"),
                lambda: ckptstore.open("ckptstore://train/step-101"),
            ):
                try:
                    answers.append(attempt())
                except ckptstore.Refused as refused:
                    answers.append(refused.message)
            emit(answers)
            emit([ckptstore.open(ref).id for ref in ("ckptstore://train", "ckptstore://train/step-100")])
            emit([reference("ckptstore://r/part/step-1"), reference("./x"), reference("r@x")])
        """)
        there = [' did you mean "step-100"?', ': there is "train"', 'did you mean "step-10"?', f'in {self.folder} did you mean "step-10"?', 'did you mean "step-10"?', 'there is "step-100']
        self.assertEqual(len(heard[0]), len(there))
        for text, part in zip(heard[0], there):
            self.assertIn(part, text)
        self.assertEqual(heard[1:], [["step-100.a1"] * 2, ["r@part~step-1", os.path.join(self.folder, "x"), "r@x"]])

    def test_interrupted_by_the_user(self) -> None:
        program = self.start("""
            import signal
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
            session = current()
            save(session, 1, b"a" * 16)
            never = save(session, 2, b"b" * 16, seal=False)
            try:
                print("waits", flush=True)
                session.wait(never.checkpoint, "committed")
            except KeyboardInterrupt:
                emit(session.wait("step-1.a1", "committed"))
        """)
        assert program.stdout is not None
        self.assertEqual(program.stdout.readline(), "waits\n")
        program.send_signal(signal.SIGINT)
        self.assertEqual(self.heard(program), ["committed"])
