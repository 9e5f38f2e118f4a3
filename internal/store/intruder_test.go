package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/ckptstore/ckptstore/internal/front"
)

// intruder is a program with the token and another client library.
type intruder struct {
	t  *testing.T
	nc *nats.Conn

	denied chan string // the server's denials
}

func intrude(t *testing.T, url string) *intruder {
	t.Helper()
	i := &intruder{t: t, denied: make(chan string, 1000)}
	var err error
	i.nc, err = nats.Connect(url, nats.Token(secretToken), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		i.denied <- err.Error()
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.nc.Close)
	return i
}

// asks sends a request and returns the error code of its answer, 0 if there is no error.
func (i *intruder) asks(m *nats.Msg) (code int, text string) {
	i.t.Helper()
	ctx, cancel := context.WithTimeout(i.t.Context(), limit)
	defer cancel()
	reply, err := i.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		i.t.Fatalf("%s is not answered: %v", m.Subject, err)
	}
	var answer struct {
		Error jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(reply.Data, &answer); err != nil {
		i.t.Fatalf("%s is answered %q", m.Subject, reply.Data)
	}
	return int(answer.Error.ErrorCode), string(reply.Data)
}

// isDenied waits until the server has denied a subject.
func (i *intruder) isDenied(subject string) {
	i.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case word := <-i.denied:
			if strings.Contains(strings.ToLower(word), strings.ToLower(`"`+subject+`"`)) {
				return
			}
		case <-timer.C:
			i.t.Fatalf("%s is not denied", subject)
		}
	}
}

// forged returns an event as any program may send it.
func forged(t *testing.T, e events.Event, with ...string) *nats.Msg {
	t.Helper()
	m := events.Encode(e)
	msg := &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data}
	for i := 0; i < len(with); i += 2 {
		msg.Header[with[i]] = []string{with[i+1]}
	}
	return msg
}

const (
	expectStream = "Nats-Expected-Stream"
	expectLast   = "Nats-Expected-Last-Subject-Sequence"
	expectLane   = "Nats-Expected-Last-Subject-Sequence-Subject"
)

// TestIntruder: a client with the token cannot change the log behind its events, make it
// unusable, or take what other clients hold, while those work.
func TestIntruder(t *testing.T) {
	t.Parallel()
	owner, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
	intrudes(t, owner, "nats://"+addr)
}

// intrudes attacks a store through the URL of its front, which other clients use meanwhile.
func intrudes(t *testing.T, owner *Store, url string) {
	t.Helper()
	access := &Access{Token: secretToken}
	trainer := openWith(t, Options{Location: url, Access: access})
	defer shut(t, trainer)
	held, release, err := trainer.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	must(t, trainer, "run", begun("step-1"))

	// A subscriber reads in parallel, and a trainer appends.
	reader := openWith(t, Options{Location: url, Access: access})
	defer shut(t, reader)
	within, sub, err := reader.Subscribe(t.Context(), "alerts")
	if err != nil {
		t.Fatal(err)
	}
	reading, stop := context.WithCancel(within)
	var seen, said atomic.Int64
	read := make(chan error, 1)
	go func() {
		for e, err := range reader.Log.Read(reading, 1, 0) {
			if err != nil {
				read <- err
				return
			}
			if strings.HasPrefix(e.ID, "work-") {
				seen.Add(1)
			}
			sub.Handled(e.Sequence)
		}
	}()
	working, rest := context.WithCancel(t.Context())
	work := make(chan error, 1)
	go func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for n := 1; working.Err() == nil; n++ {
			<-tick.C
			f, err := metrics(fmt.Sprintf("work-%d", n), "run", n)
			if err == nil {
				_, err = trainer.Log.Append(t.Context(), f)
			}
			if err != nil {
				work <- err
				return
			}
			said.Add(1)
		}
		work <- nil
	}()

	i := intrude(t, url)
	attack(t, i, owner)

	rest()
	if err := <-work; err != nil {
		t.Errorf("the trainer: %v", err)
	}
	eventually(t, "the subscriber has seen all of the trainer's events", func() bool { return seen.Load() == said.Load() })
	must(t, trainer, "run", events.CheckpointAborted{Attempt: 1, Checkpoint: "step-1.a1", Reason: "the end"})
	if held.Err() != nil {
		t.Errorf("the lease: %v", context.Cause(held))
	}
	stop()
	if err := <-read; !errors.Is(err, context.Canceled) {
		t.Errorf("the subscriber: %v", err)
	}
	if err := sub.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	for e, err := range owner.Log.Read(t.Context(), 1, last(t, owner)) {
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(e.ID, "forged") {
			t.Errorf("event %d of the log is %s", e.Sequence, e.ID)
		}
	}
	// This program's own client also gets the error at once, for exit code 12.
	err = trainer.Log.CreateTail(t.Context(), owner.ID, archive.Link{Last: 1}, jetlog.TailConfig{})
	wrong(t, err, jetlog.ErrNotAllowed)
}

func last(t *testing.T, s *Store) uint64 {
	t.Helper()
	n, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// attack runs all attacks.
func attack(t *testing.T, i *intruder, owner *Store) {
	t.Helper()
	attackStreams(t, i)
	attackInboxes(t, i)
	attackEntries(t, i)
	attackEvents(t, i, owner)
}

// attackStreams attacks the streams, directly and through what the server does for clients.
func attackStreams(t *testing.T, i *intruder) {
	t.Helper()
	for subject, body := range map[string]string{
		"STREAM.CREATE.evil":                     `{"name":"evil","subjects":["evil.x"],"republish":{"src":"evil.x","dest":"$JS.API.STREAM.DELETE.CKPT"}}`,
		"STREAM.CREATE.other":                    `{"name":"other","subjects":["other.x"],"subject_transform":{"src":"other.x","dest":"$JS.API.STREAM.DELETE.CKPT"}}`,
		"STREAM.CREATE.KV_CKPT_LEASES":           `{"name":"KV_CKPT_LEASES","subjects":["$KV.CKPT_LEASES.>"]}`,
		"STREAM.UPDATE.CKPT":                     `{"name":"CKPT","subjects":["ckpt.>"],"max_age":120000000000}`,
		"STREAM.DELETE.CKPT":                     "",
		"STREAM.PURGE.CKPT":                      "",
		"STREAM.RESTORE.CKPT":                    `{}`,
		"STREAM.SNAPSHOT.CKPT":                   `{"deliver_subject":"_INBOX.x"}`,
		"STREAM.MSG.DELETE.CKPT":                 `{"seq":1}`,
		"STREAM.DELETE.KV_CKPT_CURSOR_WITNESSES": "",
		"STREAM.INFO.evil":                       "",
		"STREAM.LIST":                            "",
		"STREAM.LEADER.STEPDOWN.CKPT":            "",
		"STREAM.NAMES":                           `{"subject":">"}`,
		"STREAM.MSG.GET.CKPT":                    `{"seq":1,"multi_last":["ckpt.>"]}`,
		"DIRECT.GET.CKPT":                        `{"multi_last":["ckpt.>"]}`,
		"INFO":                                   "",
		"ACCOUNT.PURGE.ckpt":                     "",
		"CONSUMER.CREATE.CKPT.push":              `{"stream_name":"CKPT","config":{"name":"push","deliver_policy":"all","ack_policy":"none","replay_policy":"instant","deliver_subject":"$JS.API.STREAM.DELETE.CKPT","mem_storage":true,"inactive_threshold":1000000000},"action":"create"}`,
		"CONSUMER.CREATE.CKPT.held":              `{"stream_name":"CKPT","config":{"name":"held","durable_name":"held","deliver_policy":"by_start_sequence","opt_start_seq":1,"ack_policy":"none","replay_policy":"instant","mem_storage":true,"inactive_threshold":1000000000},"action":"create"}`,
		"CONSUMER.CREATE.CKPT.ever":              `{"stream_name":"CKPT","config":{"name":"ever","deliver_policy":"by_start_sequence","opt_start_seq":1,"ack_policy":"none","replay_policy":"instant","mem_storage":true,"inactive_threshold":99999000000000},"action":"create"}`,
		"CONSUMER.CREATE.KV_CKPT_LEASES.keys":    `{"stream_name":"KV_CKPT_LEASES","config":{"name":"keys","deliver_policy":"by_start_sequence","opt_start_seq":1,"ack_policy":"none","replay_policy":"instant","mem_storage":true,"inactive_threshold":1000000000},"action":"create"}`,
		"CONSUMER.DURABLE.CREATE.CKPT.held":      `{}`,
		"CONSUMER.NAMES.CKPT":                    "",
		"CONSUMER.PAUSE.CKPT.any":                `{}`,
	} {
		if code, text := i.asks(&nats.Msg{Subject: "$JS.API." + subject, Data: []byte(body)}); code != front.CodeDenied {
			t.Errorf("%s is answered %s", subject, text)
		}
		i.isDenied("$JS.API." + subject)
	}
	for _, subject := range []string{"$SYS.REQ.SERVER.PING", "$JS.ACK.CKPT.x.1.1.1.1.1", "$JS.EVENT.ADVISORY.x", "evil2.x", "in.the.way", "_R_.x", "$KV.OTHER.x"} {
		if code, text := i.asks(&nats.Msg{Subject: subject}); code != front.CodeDenied {
			t.Errorf("%s is answered %s", subject, text)
		}
	}
}

// attackInboxes listens for messages to other clients, and answers in their place.
func attackInboxes(t *testing.T, i *intruder) {
	t.Helper()
	victim, err := nats.Connect(i.nc.ConnectedUrl(), nats.Token(secretToken))
	if err != nil {
		t.Fatal(err)
	}
	defer victim.Close()
	private := victim.NewInbox()
	answers, err := victim.SubscribeSync(private + ".*")
	if err != nil {
		t.Fatal(err)
	}
	if err := victim.FlushTimeout(limit); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{">", "ckpt.>", "*.>", "_INBOX.>", "_INBOX.*.x", "_INBOX.short.>", "$JS.API.>", "$KV.>", "ckptstore.served", private + ".>", private} {
		if _, err := i.nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		i.isDenied(subject)
	}
	for _, subject := range []string{private + ".x", "_INBOX.0123456789abcdef.x"} {
		if err := i.nc.Publish(subject, []byte(`{"stream":"CKPT","seq":1}`)); err != nil {
			t.Fatal(err)
		}
		i.isDenied(subject)
	}
	// An answer to another client, as from the server on that client's subject.
	if err := i.nc.PublishRequest("$JS.API.STREAM.INFO.CKPT", private+".x", nil); err != nil {
		t.Fatal(err)
	}
	i.isDenied(private + ".x")
	if err := victim.FlushTimeout(limit); err != nil {
		t.Fatal(err)
	}
	if n, _, err := answers.Pending(); err != nil || n != 0 {
		t.Errorf("%d messages reached the inbox of another, %v", n, err)
	}
}

// attackEntries attacks leases and cursors.
func attackEntries(t *testing.T, i *intruder) {
	t.Helper()
	js, err := jetstream.New(i.nc)
	if err != nil {
		t.Fatal(err)
	}
	at := func(bucket, key string) (string, []byte) {
		m, err := js.Stream(t.Context(), "KV_"+bucket)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := m.GetLastMsgForSubject(t.Context(), "$KV."+bucket+"."+key)
		if err != nil {
			t.Fatal(err)
		}
		return strconv.FormatUint(raw.Sequence, 10), raw.Data
	}
	const lease, follower, cursor = "run=2Erun", "cursor=2Ealerts", "alerts"
	write := func(bucket, key, value string, with ...string) *nats.Msg {
		m := &nats.Msg{Subject: "$KV." + bucket + "." + key, Data: []byte(value), Header: nats.Header{}}
		for i := 0; i < len(with); i += 2 {
			m.Header[with[i]] = []string{with[i+1]}
		}
		return m
	}
	const thief = `{"token":"thief","holder":"e30=","term_ms":10000}`
	for name, tc := range map[string]struct {
		m    func() *nats.Msg
		want int
	}{
		"overwrite a lease": {func() *nats.Msg {
			rev, _ := at(jetlog.Leases, lease)
			return write(jetlog.Leases, lease, thief, expectLast, rev)
		}, front.CodeHeld},
		"delete a lease": {func() *nats.Msg {
			rev, _ := at(jetlog.Leases, lease)
			return write(jetlog.Leases, lease, "", expectLast, rev, "KV-Operation", "DEL")
		}, front.CodeHeld},
		"take a subscriber's lease": {func() *nats.Msg {
			rev, _ := at(jetlog.Leases, follower)
			return write(jetlog.Leases, follower, thief, expectLast, rev)
		}, front.CodeHeld},
		"delete a lease without a condition": {func() *nats.Msg { return write(jetlog.Leases, lease, "", "KV-Operation", "DEL") }, front.CodeEntry},
		"overwrite without a condition":      {func() *nats.Msg { return write(jetlog.Leases, lease, thief) }, front.CodeEntry},
		"overwrite on an old condition":      {func() *nats.Msg { return write(jetlog.Leases, lease, thief, expectLast, "0") }, 10071},
		"purge": {func() *nats.Msg {
			return write(jetlog.Leases, lease, "", expectLast, "1", "KV-Operation", "PURGE")
		}, front.CodeDenied},
		"roll up":           {func() *nats.Msg { return write(jetlog.Leases, lease, thief, expectLast, "0", "Nats-Rollup", "all") }, front.CodeDenied},
		"let it expire":     {func() *nats.Msg { return write(jetlog.Leases, "new", thief, expectLast, "0", "Nats-TTL", "1s") }, front.CodeDenied},
		"junk":              {func() *nats.Msg { return write(jetlog.Leases, "new", "junk", expectLast, "0") }, front.CodeEntry},
		"no holder's token": {func() *nats.Msg { return write(jetlog.Leases, "new", `{}`, expectLast, "0") }, front.CodeEntry},
		"a lease for ever": {func() *nats.Msg {
			return write(jetlog.Leases, "new", `{"token":"t","holder":"e30=","term_ms":999999999999}`, expectLast, "0")
		}, front.CodeEntry},
		"a key that is none": {func() *nats.Msg { return write(jetlog.Leases, "a=zz", thief, expectLast, "0") }, front.CodeEntry},
		"a key of two":       {func() *nats.Msg { return write(jetlog.Leases, "a.b", thief, expectLast, "0") }, front.CodeDenied},
		"oversize":           {func() *nats.Msg { return write(jetlog.Leases, "new", strings.Repeat("x", 20<<10), expectLast, "0") }, front.CodeTooLarge},
		"another's cursor name": {func() *nats.Msg {
			return write(jetlog.Cursors, "new", `{"name":"alerts","sequence":1,"token":"x"}`, expectLast, "0")
		}, front.CodeEntry},
		"a cursor ahead of the log": {func() *nats.Msg {
			return write(jetlog.Cursors, "new", `{"name":"new","sequence":999999,"token":"x"}`, expectLast, "0")
		}, front.CodeEntry},
		"a witness of another": {func() *nats.Msg {
			return write(jetlog.Witnesses, "new", `{"name":"alerts"}`, expectLast, "0")
		}, front.CodeEntry},
	} {
		// Its holder may renew a lease after the sequence was read: the next try reads the
		// current one.
		eventually(t, name+" is refused for its own sake", func() bool {
			code, text := i.asks(tc.m())
			if tc.want == front.CodeHeld && code == 10071 {
				return false
			}
			if code != tc.want {
				t.Errorf("%s is answered %s, want code %d", name, text, tc.want)
			}
			return true
		})
	}
	// A live subscriber moves its cursor all the time.
	eventually(t, "a forged move of the cursor is refused for its own sake", func() bool {
		rev, _ := at(jetlog.Cursors, cursor)
		code, text := i.asks(write(jetlog.Cursors, cursor, `{"name":"alerts","sequence":0,"token":"x"}`, expectLast, rev))
		if code != front.CodeHeld && code != 10071 {
			t.Fatalf("moving a cursor is answered %s", text)
		}
		return code == front.CodeHeld
	})
}

// attackEvents sends messages that are not events, or not events that a client may send.
func attackEvents(t *testing.T, i *intruder, owner *Store) {
	t.Helper()
	fact, err := metrics("forged-fact", "run", 1)
	if err != nil {
		t.Fatal(err)
	}
	at := events.Stamp{ID: "forged-decision", Source: "intruder", Time: time.Now()}
	agg := events.Aggregate{Run: "run", Trial: trialName}
	pinned, err := events.NewDecision(at, agg, events.CheckpointPinned{Checkpoint: "step-1.a1"})
	if err != nil {
		t.Fatal(err)
	}
	deleted, err := events.NewDecision(at, agg, events.CheckpointDeleted{Checkpoint: "step-1.a1"})
	if err != nil {
		t.Fatal(err)
	}
	created, err := events.NewDecision(at, events.Aggregate{}, events.StoreCreated{Store: owner.ID, Format: Format})
	if err != nil {
		t.Fatal(err)
	}
	voided, err := events.NewDecision(at, events.Aggregate{}, events.LogVoided{Sequence: 1, Digest: "0a", Why: "forged"})
	if err != nil {
		t.Fatal(err)
	}
	untouched := events.Aggregate{Run: "fresh", Trial: trialName}
	fresh, err := events.NewDecision(at, untouched, begun("step-1"))
	if err != nil {
		t.Fatal(err)
	}
	end, err := owner.Log.LaneEnd(t.Context(), agg)
	if err != nil {
		t.Fatal(err)
	}
	now := strconv.FormatUint(end, 10)
	of := func(e events.Event, change func(*events.Event)) events.Event {
		change(&e)
		return e
	}
	junk := of(fact.Event, func(e *events.Event) { e.Data = []byte("junk") })
	for name, tc := range map[string]struct {
		m    *nats.Msg
		want int
	}{
		"unknown kind of a fact":             {forged(t, of(fact.Event, func(e *events.Event) { e.Kind = "foo.bar" })), front.CodeUnknownKind},
		"unknown kind in the lane":           {forged(t, of(deleted.Event, func(e *events.Event) { e.Kind = "foo.bar" }), expectLast, now, expectLane, agg.Lane(), expectStream, "CKPT"), front.CodeUnknownKind},
		"newer fact":                         {forged(t, of(fact.Event, func(e *events.Event) { e.Version = 2 })), front.CodeNewer},
		"newer decision":                     {forged(t, of(deleted.Event, func(e *events.Event) { e.Version = 2 }), expectLast, now, expectLane, agg.Lane(), expectStream, "CKPT"), front.CodeNewer},
		"no JSON":                            {forged(t, junk), front.CodeEvent},
		"wrong schema":                       {forged(t, of(fact.Event, func(e *events.Event) { e.Data = []byte(`{"iteration":"one"}`) })), front.CodeEvent},
		"no envelope":                        {&nats.Msg{Subject: "ckpt.a.main.n0.foo.bar"}, front.CodeEvent},
		"no subject of an event":             {&nats.Msg{Subject: "ckpt.a"}, front.CodeEvent},
		"another message ID":                 {forged(t, fact.Event, events.HeaderMsgID, "forged-other"), front.CodeEvent},
		"a fact in the lane":                 {forged(t, of(fact.Event, func(e *events.Event) { e.Scope.Actor = events.Server })), front.CodeLane},
		"a decision outside the lane":        {forged(t, of(deleted.Event, func(e *events.Event) { e.Scope.Actor = events.Rank(0) })), front.CodeLane},
		"no condition":                       {forged(t, deleted.Event), front.CodeLane},
		"the condition of a lane of another": {forged(t, deleted.Event, expectLast, "0", expectLane, events.Aggregate{Run: "other", Trial: "t"}.Lane(), expectStream, "CKPT"), front.CodeLane},
		"a condition of one subject":         {forged(t, deleted.Event, expectLast, "0", expectStream, "CKPT"), front.CodeLane},
		"the right condition":                {forged(t, deleted.Event, expectLast, now, expectLane, agg.Lane(), expectStream, "CKPT"), front.CodeDenied},
		"an old condition":                   {forged(t, pinned.Event, expectLast, strconv.FormatUint(end-1, 10), expectLane, agg.Lane(), expectStream, "CKPT"), 10071},
		"a place in the archive":             {forged(t, fresh.Event, expectLast, "0", expectLane, untouched.Lane(), expectStream, "CKPT", "ckpt-follows", "999999"), 10071},
		"a fact with a condition":            {forged(t, fact.Event, expectLast, "0"), front.CodeLane},
		"store.created":                      {forged(t, created.Event, expectLast, "1", expectLane, events.Aggregate{}.Lane(), expectStream, "CKPT"), front.CodeDenied},
		"log.voided":                         {forged(t, voided.Event, expectLast, "1", expectLane, events.Aggregate{}.Lane(), expectStream, "CKPT"), front.CodeDenied},
		"rollup":                             {forged(t, fact.Event, "Nats-Rollup", "all"), front.CodeDenied},
		"time to live":                       {forged(t, fact.Event, "Nats-TTL", "1s"), front.CodeDenied},
		"schedule":                           {forged(t, fact.Event, "Nats-Schedule", "@every 1s", "Nats-Schedule-Target", "ckpt.x"), front.CodeDenied},
		"a header in another spelling":       {forged(t, fact.Event, "nats-rollup", "all"), front.CodeDenied},
		"a session of another":               {forged(t, fact.Event, front.HeaderSession, "x"), front.CodeDenied},
		"oversize":                           {forged(t, of(fact.Event, func(e *events.Event) { e.Data = []byte(`{"x":"` + strings.Repeat("x", 1<<20-460) + `"}`) })), front.CodeTooLarge},
		"a batch of decisions":               {forged(t, deleted.Event, "Nats-Batch-Id", "b", "Nats-Batch-Sequence", "1", "Nats-Batch-Commit", "1"), front.CodeLane},
		"a batch without a beginning":        {forged(t, fact.Event, "Nats-Batch-Id", "c", "Nats-Batch-Sequence", "2", "Nats-Batch-Commit", "1"), front.CodeBatch},
		"a batch that continues":             {forged(t, fact.Event, "Nats-Batch-Id", "d", "Nats-Batch-Sequence", "1", "Nats-Batch-Commit", "eob"), front.CodeBatch},
	} {
		if code, text := i.asks(tc.m); code != tc.want {
			t.Errorf("%s is answered %s, want code %d", name, text, tc.want)
		}
	}
}
