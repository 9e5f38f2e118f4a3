"""Reports, stops, collectives and a worker's report of its failure."""

from launch import Launches


class Reports(Launches):
    def metrics(self, run: str = "train") -> str:
        done = self.ckptstore("metrics", run, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_iterations_are_counted(self) -> None:
        heard = self.trained(2, """
            class Scalar:
                def __init__(self, value): self.value = value
                def item(self): return self.value
            rank = current().context.rank
            emit(ckptstore.report({"loss": Scalar(0.5), "finite": True, "phase": "warm"}))
            emit(ckptstore.report({"loss": float("nan")}, step=40))
            emit(ckptstore.report({"loss": 0.25}))
            emit(ckptstore.report({"loss": 0.125, "step": 50, "done": True}))
            try:
                ckptstore.report({"loss": 0})
            except ckptstore.AlreadyDone:
                emit("done")
        """)
        self.assertEqual(sorted(map(str, heard)), ["None"] * 8 + ["done"] * 2)
        told = self.metrics()
        for part in ("40", "41", "50", "0.125", "warm"):
            self.assertIn(part, told)

    def test_what_cannot_be_reported_is_named(self) -> None:
        heard = self.trained(1, """
            class Many:
                def item(self): raise ValueError("can only convert an array of size 1")
            for value in ([1], None, 1j, {"a": 1}, Many()):
                try:
                    ckptstore.report({"good": 1, "bad": value})
                except TypeError as error:
                    emit("'bad'" in str(error))
            for metrics, step in (({"__duplicate__": True}, None), ({"done": 1}, None), ({}, 1.5), ({}, True)):
                try:
                    ckptstore.report(metrics, step)
                except (TypeError, ValueError) as error:
                    emit(True)
            emit(ckptstore.report({"good": 1}))
        """)
        self.assertEqual(heard, [True] * 9 + [None])

    def test_ranks_that_do_not_agree(self) -> None:
        self.trained(2, """
            if current().context.rank == 0:
                ckptstore.report({"loss": 1}, done=True)
            else:
                ckptstore.report({"loss": 1})
                ckptstore.report({"loss": 1})
        """, code=1)
        self.assertIn("ranks [1] reported while ranks [0] have ended", self.output)

    STOPS = """
        import subprocess
        rank = current().context.rank
        step = 0
        while True:
            step += 1
            why = {ask}
            if step == 3 and rank == 0:
                subprocess.run([os.environ["CKPTSTORE_BIN"], {how!r}, current().context.run, "--store", os.environ["CKPTSTORE_STORE"]], check=True, stdout=subprocess.DEVNULL)
            if why:
                break
        emit([step, why, ckptstore.context().stop])
        if why == "preempt":
            current().wait(save(current(), step, b"a" * 16).checkpoint, "committed")
    """

    def test_a_stop_comes_at_the_same_step(self) -> None:
        one, two = self.trained(2, self.STOPS.format(ask='ckptstore.report({"loss": 1})', how="preempt"), code=75)
        self.assertEqual(one, two)
        self.assertEqual(one[1:], ["preempt", "preempt"])

    def test_a_stop_without_reports(self) -> None:
        one, two = self.trained(2, self.STOPS.format(ask="ckptstore.should_stop()", how="stop"))
        self.assertEqual(one, two)
        self.assertEqual(one[1:], ["stop", "stop"])

    def test_the_context(self) -> None:
        heard = self.trained(2, """
            ckptstore.init(config={"lr": 1, "depth": 3}, run="another")
            context = ckptstore.context()
            emit([context.run, context.rank, context.local_rank, context.world_size, context.attempt, context.resume, context.config, context.stop])
        """, "--set", "lr=2", "--name", "bert")
        self.assertCountEqual(heard, [["bert", rank, rank, 2, 1, None, {"lr": 2, "depth": 3}, None] for rank in range(2)])
        self.assertIn("the trainer sets run to 'bert': 'another' is ignored", self.output)

    def test_it_works_with_an_agent(self) -> None:
        heard = self.program("""
            emit([ckptstore.report({"loss": 1}, 7), ckptstore.report({"loss": 0.5}), ckptstore.should_stop(), ckptstore.context().rank])
        """)
        self.assertEqual(heard, [[None, None, None, 0]])
        self.assertIn("0.5", self.metrics())


class Collectives(Launches):
    def test_values_of_any_length(self) -> None:
        heard = self.trained(3, """
            rank = current().context.rank
            emit(ckptstore.all_gather_object("x" * (rank * 1000)) == ["", "x" * 1000, "x" * 2000])
            emit(ckptstore.all_gather_object({"rank": rank, "parts": [b"\\0"] * rank}) == [{"rank": r, "parts": [b"\\0"] * r} for r in range(3)])
            emit([ckptstore.broadcast_object(("from", rank), root=root) for root in range(3)] == [("from", root) for root in range(3)])
            emit(ckptstore.broadcast_object(b"\\0" * 100000 if rank == 0 else None) == b"\\0" * 100000)
        """)
        self.assertEqual(heard, [True] * 12)

    def test_a_value_that_cannot_be_pickled_is_everybodys_error(self) -> None:
        heard = self.trained(2, """
            rank = current().context.rank
            for do in (lambda: ckptstore.all_gather_object((lambda: 0) if rank == 1 else 0),
                       lambda: ckptstore.broadcast_object((lambda: 0), root=1)):
                try:
                    do()
                except ckptstore.Error as error:
                    emit("the value of rank 1 cannot be pickled" in str(error))
            emit(ckptstore.all_gather_object(rank))
        """)
        self.assertEqual(heard.count(True), 4)
        self.assertEqual(heard.count([0, 1]), 2)

    def test_threads_at_once(self) -> None:
        # The order of the ranks may differ; requests of one collective stay together.
        heard = self.trained(1, """
            out = []
            threads = [threading.Thread(target=lambda n=n: out.append(ckptstore.all_gather_object(n) == [n])) for n in range(16)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            emit(out)
        """)
        self.assertEqual(heard, [[True] * 16])

    def test_alone_nothing_is_started(self) -> None:
        heard = self.program("""
            emit([ckptstore.all_gather_object(1), ckptstore.broadcast_object(2)])
            emit(os.path.exists(os.environ["CKPTSTORE_STORE"]))
        """)
        self.assertEqual(heard, [[[1], 2], False])


class Failures(Launches):
    def test_the_cause_is_in_the_log(self) -> None:
        self.trained(2, """
            @ckptstore.record
            def main(rank):
                if rank == 1:
                    raise ValueError("loss is not finite: ä")
                ckptstore.all_gather_object(0)
            main(current().context.rank)
        """, code=1)
        self.assertIn("ValueError: loss is not finite: ä", self.output)
        done = self.ckptstore("events", "--json")
        self.assertIn("raise ValueError", done.stdout)

    def test_an_end_is_no_failure(self) -> None:
        self.assertEqual([False], self.trained(1, """
            @ckptstore.record
            def main():
                sys.exit(3)
            try:
                main()
            except SystemExit:
                emit(os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]))
        """))
