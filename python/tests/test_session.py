"""Saves, loads and their failures, under a trainer."""

from launch import Launches


class Sessions(Launches):
    def test_what_is_saved_is_loaded(self) -> None:
        heard = self.trained(2, """
            session = current()
            for step in range(4):
                slot = save(session, step, bytes([step, session.context.rank] * 8))
                emit(["fresh", slot.fresh])
            session.wait(slot.checkpoint, "committed")
            emit(["loaded", session.context.rank, load(session, slot.checkpoint).hex()])
            emit(["first", session.context.rank, load(session, "step-0.a1").hex()])
        """)
        self.assertEqual([one for one in heard if one[0] == "fresh"].count(["fresh", True]), 2)  # each rank sends its plan once
        self.assertCountEqual([one for one in heard if one[0] == "loaded"], [["loaded", 0, "0300" * 8], ["loaded", 1, "0301" * 8]])
        self.assertCountEqual([one for one in heard if one[0] == "first"], [["first", 0, "0000" * 8], ["first", 1, "0001" * 8]])

    def test_a_plan_that_the_trainer_has_forgotten_is_said_again(self) -> None:
        heard = self.trained(1, """
            session = current()
            for count in range(7):
                save(session, count, b"a" * 16, items=items(session, f"w{count % 6}"))
            for key, (_, offsets) in session._plans.items():
                session._plans[key] = "0" * 64, offsets
            slot = save(session, 9, b"b" * 16, items=items(session, "w0"))
            session.wait(slot.checkpoint, "committed")
            with session.load(items(session, "w0"), slot.checkpoint) as loaded:
                emit([slot.fresh, loaded.bytes(0).decode(), len(session._plans)])
        """)
        self.assertEqual(heard, [[True, "b" * 16, 4]])

    def test_a_save_is_skipped_when_all_slots_are_in_use(self) -> None:
        heard = self.trained(1, """
            session = current()
            first = save(session, 1, b"a" * 16, seal=False)
            try:
                save(session, 2, b"b" * 16)
            except ckptstore.SaveSkipped as skipped:
                emit([skipped.checkpoint, "slot" in str(skipped)])
            first.seal()
            emit(session.wait(first.checkpoint, "committed"))
        """, "--when-busy", "skip", "--staging-slots", "1")
        self.assertEqual(heard, [["step-2.a1", True], "committed"])

    def test_a_rank_that_never_saves_is_named(self) -> None:
        heard = self.trained(2, """
            session = current()
            if session.context.rank == 0:
                try:
                    slot = save(session, 1, b"a" * 16)
                    session.wait(slot.checkpoint, "committed")
                except ckptstore.SaveAborted as aborted:
                    emit([aborted.checkpoint, aborted.reason])
            ckptstore.all_gather_object(None)
        """, "--save-timeout", "3s", code=1)  # because it is the last save
        self.assertEqual(len(heard), 1, heard)
        self.assertTrue(heard[0][0].startswith("step-1"))
        self.assertIn("1", heard[0][1])

    def test_waiting_ends(self) -> None:
        heard = self.trained(1, """
            session = current()
            slot = save(session, 1, b"a" * 16, seal=False)
            try:
                session.wait(slot.checkpoint, "committed", timeout=0.2)
            except TimeoutError as late:
                emit(str(late).split(" on ")[0])
            slot.seal()
            emit(session.wait(slot.checkpoint, "committed", timeout=120))
        """)
        self.assertEqual(heard, ["wait: no answer within 0.2 s", "committed"])

    def test_a_refusal_says_why(self) -> None:
        heard = self.trained(1, """
            session = current()
            try:
                session.begin_save(1, [{"fqn": "w", "dtype": "float99", "shape": [1], "offsets": [0], "sizes": [1], "bytes": 4}])
            except ckptstore.Refused as refused:
                emit([refused.request, refused.status, "float99" in str(refused)])
            from ckptstore._wire import Wire
            try:
                Wire(session.wire.path, "no").call("heartbeat")
            except ckptstore.Refused as refused:
                emit([refused.request, refused.status])
        """)
        self.assertEqual(heard, [["save", 400, True], ["heartbeat", 401]])

    def test_threads_save_at_once(self) -> None:
        heard = self.trained(1, """
            session, done = current(), []
            def work(number):
                for step in range(3):
                    slot = save(current(), step, bytes([number] * 16), name=f"t{number}-{step}")
                    current().wait(slot.checkpoint, "committed")
                done.append(number)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            emit([sorted(done), [load(session, f"t{number}-2.a1")[0] for number in range(6)]])
        """)
        self.assertEqual(heard, [[list(range(6))] * 2])

    def test_memory_that_is_full_is_an_exception_of_its_own(self) -> None:
        heard = self.trained(1, """
            session, size = current(), 8 << 20
            try:
                session.begin_save(1, [{"fqn": "w", "dtype": "uint8", "shape": [size], "offsets": [0], "sizes": [size], "bytes": size}])
            except ckptstore.StoreFull as full:
                emit([full.status, "staging" in str(full)])
        """, "--staging-memory", "1MiB")
        self.assertEqual(heard, [[507, True]])

    def test_an_abort_names_its_checkpoint_once(self) -> None:
        from ckptstore import SaveAborted

        refused = SaveAborted("step-1", "checkpoint step-1.a1 was aborted: replicas differ")
        self.assertEqual(str(refused), "checkpoint step-1.a1 was aborted: replicas differ")
        self.assertEqual((refused.checkpoint, refused.reason), ("step-1.a1", "replicas differ"))
