"""Child processes of a rank: forked, spawned, other ranks, other programs."""

from launch import Launches


class Children(Launches):
    def test_a_fork_in_the_middle_of_a_session(self) -> None:
        # Threads constantly hold the session's locks and connections.
        heard = self.trained(1, """
            session, over = current(), threading.Event()
            def busy():
                while not over.is_set():
                    current().wire.call("heartbeat")
                    services()
                    session._maps.mapped()
            threads = [threading.Thread(target=busy) for _ in range(4)]
            for thread in threads: thread.start()
            save(session, 1, b"a" * 16)
            good = 0
            for number in range(20):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        mine = current()
                        assert mine is not session and mine.context == session.context
                        slot = save(mine, number, bytes([number] * 16), name=f"child-{number}")
                        mine.wait(slot.checkpoint, "committed")
                        for _ in range(50):  # what belongs to the parent has connections of its own here
                            assert session.wait(slot.checkpoint, "committed") == "committed"
                        code = 0
                    finally:
                        os._exit(code)
                ended = 0, 1
                while ended[0] == 0:
                    assert session.wire.call("heartbeat") == {}
                    ended = os.waitpid(child, os.WNOHANG)
                good += ended[1] == 0
            over.set()
            for thread in threads: thread.join()
            slot = save(session, 30, b"p" * 16)
            session.wait(slot.checkpoint, "committed")
            emit([good, load(session, slot.checkpoint).decode(), load(session, "child-7.a1")[0]])
        """)
        self.assertEqual(heard, [[20, "p" * 16, 7]])

    def test_what_a_load_brought_survives_a_child(self) -> None:
        heard = self.trained(1, """
            session = current()
            session.wait(save(session, 1, b"a" * 16).checkpoint, "committed")
            loaded = session.load(items(session), "step-1.a1")
            child = os.fork()
            if child == 0:
                try:
                    assert loaded.bytes(0) == b"a" * 16
                    loaded.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            emit(os.waitpid(child, 0)[1])
            emit(loaded.bytes(0).decode())
            loaded.close()
        """)
        self.assertEqual(heard, [0, "a" * 16])

    SPAWNED = """
        import multiprocessing, pickle
        def child(rank, world):
            if world:
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT="29511")
            context = current().context
            slot = save(current(), 7, bytes([context.rank] * 16))
            current().wait(slot.checkpoint, "committed")
            emit([context.run, context.job, context.rank, context.world_size, os.environ.get("CKPTSTORE_JOINED", "").count("socket")])
        def run(world):
            processes = [multiprocessing.get_context("spawn").Process(target=child, args=(rank, world)) for rank in range(world or 1)]
            for process in processes: process.start()
            for process in processes: process.join()
            assert not any(process.exitcode for process in processes)
        if __name__ == "__main__":
            if sys.argv[1:]:
                ckptstore.init(run="spawner")
            session = current()
            emit(["parent", session.context.job])
            for thing in (session, session.wire):
                try:
                    pickle.dumps(thing)
                except TypeError as error:
                    emit("belongs to its process" in str(error))
            if sys.argv[1:]:
                ckptstore.close()  # a run has one job at a time
            run(int(sys.argv[1]) if sys.argv[1:] else 0)
    """

    def test_a_spawned_child_is_the_same_rank(self) -> None:
        parent, *pickled, child = self.trained(1, self.SPAWNED)
        self.assertEqual(pickled, [True, True])
        self.assertEqual(child, ["train", parent[1], 0, 1, 0])

    def test_a_spawned_child_is_the_same_rank_of_an_agent(self) -> None:
        parent, *_, child = self.program(self.SPAWNED)
        self.assertEqual(child, ["train", parent[1], 0, 1, 1])

    def test_spawned_ranks_join_by_themselves(self) -> None:
        parent, *_, one, two = self.program(self.SPAWNED, "2")
        self.assertEqual(one[1], two[1])
        self.assertNotEqual(one[1], parent[1])
        self.assertCountEqual([values[2:4] for values in (one, two)], [[0, 2], [1, 2]])
        self.assertEqual(one[0], "spawner")  # children inherit the parent's init

    def test_another_program_is_a_launch_of_its_own(self) -> None:
        heard = self.program("""
            import subprocess
            try:
                emit(current().context.rank)
            except ckptstore.Conflict as conflict:
                emit("is in use" in str(conflict))
            if len(sys.argv) == 1:
                subprocess.run([sys.executable, __file__, "again"], check=True)
        """, CKPTSTORE_RUN="given")
        self.assertEqual(heard, [0, True])

    def test_a_forked_child_leaves_nothing(self) -> None:
        heard = self.program("""
            session = current()
            child = os.fork()
            if child == 0:
                current()
                sys.exit(0)  # with what is registered for the end of the program
            emit(os.waitpid(child, 0)[1])
            emit(session.wait(save(session, 1, b"a" * 16).checkpoint, "committed"))
        """)
        self.assertEqual(heard, [0, "committed"])
