package store

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// trespass appends messages that are not events, bypassing this package: on every kind of
// subject, of a used run and an unused one. It returns the sequences of the void messages.
func trespass(c *natstest.Client, run string) (voids []uint64) {
	scopes := func(k events.Kind) []events.Scope {
		if k.Decides() {
			return []events.Scope{{Run: run, Trial: trialName, Actor: events.Server}, {Run: "unused", Trial: trialName, Actor: events.Server}, {Actor: events.Server}}
		}
		return []events.Scope{{Run: run, Trial: trialName, Actor: events.Rank(0)}, {Run: "unused", Trial: trialName, Actor: events.Node(0)}}
	}
	put := func(subject string, header map[string][]string, data string) {
		voids = append(voids, c.Publish(subject, header, []byte(data)))
	}
	envelope := func(s events.Scope, k events.Kind, data string) (string, map[string][]string) {
		m := events.Encode(events.Event{ID: NewID(), Kind: k, Version: 1, Source: "stranger", Time: time.Now(), Scope: s, Data: []byte(data)})
		return m.Subject, m.Header
	}
	for _, k := range events.Pattern("*.*").Kinds() {
		for _, s := range scopes(k) {
			put(events.Subject(s, k), nil, "junk")
			put(events.Subject(s, k), map[string][]string{"a": {"b"}}, "{}")
			subject, header := envelope(s, k, "[]")
			if k.Decides() { // with its condition, which any client can compute
				header["Nats-Expected-Last-Subject-Sequence"] = []string{"0"}
				header["Nats-Expected-Last-Subject-Sequence-Subject"] = []string{"ckpt.nothing.nothing.s.>"}
			}
			put(subject, header, `"of another schema"`)
			subject, header = envelope(s, k, "{}")
			header[events.HeaderMsgID] = []string{NewID()}
			put(subject, header, "{}")
			if k.Decides() {
				subject, header = envelope(s, k, "{}")
				put(subject, header, "{}")
			}
		}
	}
	for _, subject := range []string{
		"ckpt.x", "ckpt.a.b.c.d.e.f.g.h", "ckpt." + run + "." + trialName + ".s.one", "ckpt." + run + "." + trialName + ".s.one.two.three",
		"ckpt._._.s.log.void", "ckpt._._.s.store.created", "ckpt.%%%.%zz.s.checkpoint.committed", "ckpt." + run + "." + trialName + ".r-1.report.metrics",
	} {
		put(subject, nil, "")
		put(subject, nil, "\x00\xff\x1b[31m")
	}
	voids = append(voids, c.Send("ckpt."+run+"."+trialName+".r0.report.metrics", "garbage that is no header\r\n\r\n", []byte("{}")))
	rank, lane := events.Scope{Run: run, Trial: trialName, Actor: events.Rank(0)}, events.Scope{Run: run, Trial: trialName, Actor: events.Server}
	subject, header := envelope(rank, "report.metrics", "{}")
	header[events.HeaderTime] = []string{"9999-12-31T23:59:59-23:59"}
	put(subject, header, "{}")
	subject, header = envelope(rank, "report.metrics", "{}")
	put(subject, header, `{"metrics":{"x":`+strings.Repeat("[", 9998)+strings.Repeat("]", 9998)+`}}`)
	subject, header = envelope(lane, "report.metrics", "{}")
	put(subject, header, "{}")
	for range 2 {
		subject, header = envelope(rank, "checkpoint.pinned", "{}")
		put(subject, header, `{"checkpoint":"x"}`)
	}
	created, header := envelope(events.Scope{Actor: events.Server}, "store.created", `{"store":"another","format":1}`)
	header["Nats-Expected-Last-Subject-Sequence"] = []string{"0"}
	header["Nats-Expected-Last-Subject-Sequence-Subject"] = []string{"ckpt.nothing.nothing.s.>"}
	put(created, header, `{"store":"another","format":1}`)
	for _, subject := range []string{"ckpt." + run + "." + trialName + ".s", "ckpt._._.s"} { // last, next to the lanes
		put(subject, nil, "")
	}
	return voids
}

// TestNoMessageIsFatal: whatever a client with a server's own credentials appends, the store stays
// open, runs that save and decide meanwhile continue, and messages that are not events are recorded.
func TestNoMessageIsFatal(t *testing.T) {
	t.Parallel()
	url, srv := server(t)
	if _, err := Init(t.Context(), url, filepath.Join(t.TempDir(), "shared")); err != nil {
		t.Fatal(err)
	}
	trainer := start(t, "actor")
	trainer.do(request{Do: "open", Location: url})
	trainer.do(request{Do: "hammer", Run: "busy", Name: "busy"})
	subscriber, err := Open(t.Context(), Options{Location: url, Reader: true})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(t, subscriber)
	seen := make(chan uint64, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		last := uint64(0)
		for e, err := range subscriber.Log.Read(ctx, 1, 0) {
			if err != nil {
				break
			}
			last = e.Sequence
		}
		seen <- last
	}()

	voids := trespass(natstest.Connect(t, url), "busy")
	s := open(t, url)
	must(t, s, "another", begun("step-1"))
	eventually(t, "all voids recorded", func() bool {
		open := 0
		err := s.followed.View(func(r projections.Reader) error {
			open = 0
			return projections.Voids(r, 0, func(v projections.Void) error {
				if v.RecordedSeq == 0 {
					open++
				}
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		last, err := s.Log.Last(t.Context())
		return err == nil && open == 0 && last > voids[len(voids)-1]
	})
	trainer.do(request{Do: "stop"})
	onceEach(t, s, trainer.acknowledged())

	read, err := s.VerifyLog(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(read.Findings) > 0 || read.VoidCount != len(voids) || read.Unrecorded != 0 || read.Newer != 0 {
		t.Errorf("%d voids of %d, %d not recorded, %d newer, %v", read.VoidCount, len(voids), read.Unrecorded, read.Newer, read.Findings)
	}
	alike(t, s)
	for i, v := range read.Voids {
		if v.Sequence != voids[i] {
			t.Errorf("message %d is void, want %d: %s", v.Sequence, voids[i], v.Why)
		}
	}
	if runs, err := query.Ask(t.Context(), s.Views(), query.Runs, query.Params{}); err != nil || len(runs) != 2 {
		t.Errorf("the runs are %v, %v", runs, err)
	}
	cancel()
	if last := <-seen; last < voids[len(voids)-1] {
		t.Errorf("the subscriber stopped at event %d", last)
	}
	shut(t, s)
	again := open(t, url)
	shut(t, again)
	trainer.end()
	srv.end()
}

// TestNewerEvent: an event of a newer version stops queries about its run, and no other queries. No
// message is void.
func TestNewerEvent(t *testing.T) {
	t.Parallel()
	url, srv := server(t)
	if _, err := Init(t.Context(), url, filepath.Join(t.TempDir(), "shared")); err != nil {
		t.Fatal(err)
	}
	s := open(t, url)
	for _, run := range []string{"old", "fact", "decision", "version"} {
		must(t, s, run, begun("step-1"))
	}
	c := natstest.Connect(t, url)
	newer := func(run string, actor events.Actor, k events.Kind, version int) {
		m := events.Encode(events.Event{ID: NewID(), Kind: k, Version: version, Source: "newer", Time: time.Now(), Scope: events.Scope{Run: run, Trial: trialName, Actor: actor}, Data: []byte("{}")})
		c.Publish(m.Subject, m.Header, []byte("{}"))
	}
	newer("fact", events.Rank(0), "report.dreams", 1)
	newer("decision", events.Server, "checkpoint.teleported", 1)
	newer("version", events.Rank(0), "report.metrics", 2)
	stopped := func(s *Store) {
		t.Helper()
		for _, run := range []string{"fact", "decision", "version"} {
			_, err := query.Ask(t.Context(), s.Views(), query.Trial, query.Params{Run: run, Trial: trialName})
			wrong(t, err, events.ErrNewer, run, "upgrade")
			_, err = s.Pin(t.Context(), run+"@step-1.a1", "")
			wrong(t, err, events.ErrNewer, run)
		}
		if _, err := query.Ask(t.Context(), s.Views(), query.Trial, query.Params{Run: "old", Trial: trialName}); err != nil {
			t.Error(err)
		}
	}
	stopped(s)
	committed(t, s, "old", 1)
	read, err := s.VerifyLog(t.Context(), nil)
	if err != nil || read.Newer != 3 || read.VoidCount != 0 || len(read.Findings) > 0 {
		t.Errorf("%+v, %v", read, err)
	}
	shut(t, s)
	s = open(t, url)
	stopped(s)

	// One of the store itself stops all.
	newer("", events.Server, "access.dreamed", 1)
	_, err = query.Ask(t.Context(), s.Views(), query.Trial, query.Params{Run: "old", Trial: trialName})
	if !errors.Is(err, events.ErrNewer) {
		t.Errorf("the run that is left: %v", err)
	}
	shut(t, s)
	shut(t, open(t, url))
	srv.end()
}

// TestOwnerPassesOver: the same in a directory, whose log clients reach only through the owner:
// messages that an earlier version let in are recorded, and the store opens.
func TestOwnerPassesOver(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	committed(t, s, "run", 1)
	must(t, s, "newer", begun("step-1"))
	log := s.owner.ownership().log
	decides := func(run string, version int, data string) uint64 {
		t.Helper()
		agg := events.Aggregate{Run: run, Trial: trialName}
		d, err := events.NewDecision(Stamp("stranger"), agg, events.CheckpointAborted{Checkpoint: "step-1.a1"})
		if err != nil {
			t.Fatal(err)
		}
		d.Version, d.Data = version, []byte(data)
		end, err := log.LaneEnd(t.Context(), agg)
		if err != nil {
			t.Fatal(err)
		}
		seq, err := log.Decide(t.Context(), d, end)
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
	void := decides("run", 1, `"step-1.a1"`)
	eventually(t, "a record of the void", func() (is bool) {
		err := s.owner.ownership().views.View(func(r projections.Reader) error {
			return projections.Voids(r, 0, func(v projections.Void) error {
				is = v.Sequence == void && v.RecordedSeq > void
				return nil
			})
		})
		return is && err == nil
	})
	decides("newer", 2, `{}`)
	read, err := s.VerifyLog(t.Context(), nil)
	if err != nil || read.VoidCount != 1 || read.Unrecorded != 0 || read.Newer != 1 || len(read.Findings) > 0 {
		t.Errorf("%+v, %v", read, err)
	}
	shut(t, s)
	s = open(t, dir)
	if c, err := query.Ask(t.Context(), s.Views(), query.Resolve, query.Params{Ref: "run@step-1"}); err != nil || c.State != projections.Committed {
		t.Errorf("%s, %v", c.State, err)
	}
	_, err = query.Ask(t.Context(), s.Views(), query.Trial, query.Params{Run: "newer", Trial: trialName})
	wrong(t, err, events.ErrNewer, "newer")
	to := filepath.Join(t.TempDir(), "copy")
	_, err = s.Backup(t.Context(), to, BackupOptions{})
	wrong(t, err, events.ErrNewer, "newer") // the files to copy are not known
	shut(t, s)
}
