package auditreport

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

var update = flag.Bool("update", false, "write the golden files")

// recorded is a log in memory.
type recorded []events.Recorded

func (l recorded) Last(context.Context) (uint64, error) { return uint64(len(l)), nil }

func (l recorded) At(_ context.Context, seq uint64) (events.Recorded, error) {
	if seq == 0 || seq > uint64(len(l)) {
		return events.Recorded{}, fmt.Errorf("%w: event %d", projections.ErrNotFound, seq)
	}
	return l[seq-1], nil
}

func (l recorded) ReadLane(_ context.Context, agg events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	return func(yield func(events.Recorded, error) bool) {
		for _, r := range l {
			if r.Sequence >= from && r.Sequence <= until && agg.Owns(r.Event) && !yield(r, nil) {
				return
			}
		}
	}
}

// folded returns the rows as of an event.
func (l recorded) folded(seq uint64) (query.Source, error) {
	rows := projections.NewMemory()
	for _, r := range l[:seq] {
		if err := projections.Apply(rows, r); err != nil {
			return nil, err
		}
	}
	return query.Past{Rows: rows, Sequence: seq}, nil
}

func (l recorded) from(t *testing.T, live uint64) From {
	t.Helper()
	views, err := l.folded(live)
	if err != nil {
		t.Fatal(err)
	}
	return From{Store: "0197-store", Log: l, Views: views, AsOf: func(_ context.Context, seq uint64) (query.Source, error) { return l.folded(seq) }, Head: noHead}
}

func noHead() (*Head, string, error) { return nil, NoAudit, nil }

// golden is the recorded log of package projections.
func golden(t *testing.T) recorded { return goldenOf(t, "golden-log-v1.jsonl") }

func goldenOf(t *testing.T, name string) recorded {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "projections", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	var l recorded
	for line := range bytes.Lines(text) {
		var r events.Recorded
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		l = append(l, r)
	}
	return l
}

// TestAccess: a report has who was given access to the store, by whom, and who lost it, up to its
// last event.
func TestAccess(t *testing.T) {
	t.Parallel()
	l := goldenOf(t, "golden-log-access.jsonl")
	for asOf, want := range map[uint64]string{
		3: "| 2 | 2026-11-27 14:30:02Z | uid:1000 (ckptstore), as uid:1000@node-a | ada | operator | laptop 8c9d0e1f20314253 | 2026-12-24T12:00:00Z |\n",
		5: "| 4 | 2026-11-27 14:30:04Z | uid:1000 (ckptstore), as uid:1000@node-a | ada | revoked | 8c9d0e1f20314253 | - |\n",
	} {
		r, err := New(t.Context(), l.from(t, asOf), "run", asOf)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := r.Markdown(&out); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), want+"\n## ") || len(r.Access) != int(asOf)/2 {
			t.Errorf("as of %d: %s", asOf, out.String())
		}
		if len(r.Decisions) != int(asOf+1)/2-1 {
			t.Errorf("as of %d the run has the decisions %+v", asOf, r.Decisions)
		}
	}
}

// TestGolden renders reports of a recorded log.
func TestGolden(t *testing.T) {
	t.Parallel()
	l := golden(t)
	from := l.from(t, uint64(len(l)))
	for _, c := range []struct {
		name, run string
		asOf      uint64
	}{{"killed", "killed", 0}, {"killed-as-of-60", "killed", 60}, {"sweep", "sweep", 0}} {
		r, err := New(t.Context(), from, c.run, c.asOf)
		if err != nil {
			t.Fatal(err)
		}
		for form, write := range map[string]func(io.Writer) error{"json": r.JSON, "md": r.Markdown, "html": r.HTML} {
			var out bytes.Buffer
			if err := write(&out); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", c.name+"."+form)
			if *update {
				if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(out.Bytes(), want) {
				t.Errorf("%s differs; after a change that is meant, write it with -update:\n%s", path, out.Bytes())
			}
		}
	}
	if _, err := New(t.Context(), from, "none", 0); err == nil {
		t.Error("a report of a run that does not exist")
	}
}

// TestHead: a report names the newest head and the events that it does not cover.
func TestHead(t *testing.T) {
	t.Parallel()
	l := golden(t)
	end := uint64(len(l))
	failed := errors.New("the head does not verify")
	for _, c := range []struct {
		head   *Head
		none   string
		err    error
		asOf   uint64
		proven string
	}{
		{nil, NoAudit, nil, 0, "no head: audit is not configured"},
		{nil, "none was published yet", nil, 0, "no head: none was published yet"},
		{&Head{"example.org/log", end, "abc="}, "", nil, 0, fmt.Sprintf("example.org/log: %d events, root abc=", end)},
		{&Head{"example.org/log", end + 5, "abc="}, "", nil, 60, fmt.Sprintf("example.org/log: %d events, root abc=", end+5)},
		{&Head{"example.org/log", 50, "abc="}, "", nil, 60, "example.org/log: 50 events, root abc=; it does not cover events 51 to 60"},
		{nil, "", failed, 0, ""},
	} {
		from := l.from(t, end)
		from.Head = func() (*Head, string, error) { return c.head, c.none, c.err }
		r, err := New(t.Context(), from, "killed", c.asOf)
		if !errors.Is(err, c.err) {
			t.Fatalf("%v, want %v", err, c.err)
		}
		if c.err != nil {
			continue
		}
		if r.Proven != c.proven || r.Head != c.head {
			t.Errorf("proven %q by %v, want %q by %v", r.Proven, r.Head, c.proven, c.head)
		}
		var out bytes.Buffer
		if err := r.Markdown(&out); err != nil {
			t.Fatal(err)
		}
		if checked := strings.Contains(out.String(), "| Checked |"); checked != (c.head != nil) {
			t.Errorf("what was checked of the head %v: %v", c.head, checked)
		}
	}
}

// TestRowsAheadOfTheLog: rows of events after the end that was read are never in a report.
func TestRowsAheadOfTheLog(t *testing.T) {
	t.Parallel()
	l := golden(t)
	end := uint64(60)
	from := l.from(t, uint64(len(l)))
	from.Log = l[:end]
	have, err := New(t.Context(), from, "killed", 0)
	if err == nil {
		t.Errorf("a report about event %d of a log of %d", have.AsOf, end)
	}
	// A log that grows while it is read gets a report as of an event that it has.
	grown := &growing{recorded: l, ends: []uint64{60, 61, 62}}
	from.Log = grown
	have, err = New(t.Context(), from, "killed", 0)
	if err != nil {
		t.Fatal(err)
	}
	want, err := New(t.Context(), l.from(t, have.AsOf), "killed", have.AsOf)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := text2(t, have), text2(t, want); a != b {
		t.Errorf("as of %d:\n%s\nwant\n%s", have.AsOf, a, b)
	}
}

func text2(t *testing.T, r Report) string {
	t.Helper()
	var b strings.Builder
	if err := r.JSON(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// growing reports ends before the true one.
type growing struct {
	recorded
	ends []uint64
}

func (g *growing) Last(ctx context.Context) (uint64, error) {
	if len(g.ends) == 0 {
		return g.recorded.Last(ctx)
	}
	end := g.ends[0]
	g.ends = g.ends[1:]
	return end, nil
}

// counting counts the rows that a report reads.
type counting struct {
	projections.Reader
	rows int
}

func (c *counting) Get(key []byte) ([]byte, error) {
	c.rows++
	return c.Reader.Get(key)
}

func (c *counting) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	return c.Reader.Scan(lo, hi, func(key, value []byte) error {
		c.rows++
		return visit(key, value)
	})
}

// TestReportsAreCounted: neither the rows that are read nor the report grow with the reports
// of metrics, nor with other runs.
func TestReportsAreCounted(t *testing.T) {
	t.Parallel()
	made := func(reports, others int) (Report, int) {
		b := &building{at: time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)}
		b.add("", "", events.Server, &events.StoreCreated{Store: "0197-store", Format: 1, Data: "data"})
		for i := range others {
			b.add(fmt.Sprint("other-", i), "main", events.Server, &events.TrialCreated{})
		}
		b.add("run", "", events.Node(0), &events.JobStarted{Job: "j", Host: "h", Command: []string{"train"}})
		b.add("run", "main", events.Server, &events.TrialCreated{})
		b.add("run", "main", events.Server, &events.GroupStarted{Attempt: 1, Job: "j", WorldSize: 1})
		for i := range reports {
			b.add("run", "main", events.Node(0), &events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i + 1), Metrics: map[string]any{"loss": 0.5}})
		}
		if b.err != nil {
			t.Fatal(b.err)
		}
		from := b.log.from(t, uint64(len(b.log)))
		past := from.Views.(query.Past)
		rows := &counting{Reader: past.Rows}
		past.Rows = rows
		from.Views = past
		r, err := New(t.Context(), from, "run", 0)
		if err != nil {
			t.Fatal(err)
		}
		return r, rows.rows
	}
	few, little := made(10, 1)
	many, much := made(5000, 300)
	if many.Trials[0].Reports != 5000 || few.Trials[0].Reports != 10 {
		t.Errorf("%d and %d reports", few.Trials[0].Reports, many.Trials[0].Reports)
	}
	if a, b := len(text2(t, few)), len(text2(t, many)); b > a+50 {
		t.Errorf("a report of %d bytes about 10 iterations, of %d about 5000", a, b)
	}
	if much > little+20 {
		t.Errorf("%d rows were read for 10 iterations, %d for 5000", little, much)
	}
}

// building makes a log.
type building struct {
	log recorded
	at  time.Time
	err error
}

func (b *building) add(run, trial string, actor events.Actor, body events.Body) {
	seq := uint64(len(b.log) + 1)
	at := b.at.Add(time.Duration(seq) * time.Second)
	stamp, scope := events.Stamp{ID: fmt.Sprint("id-", seq), Source: "trainer/j", Time: at}, events.Scope{Run: run, Trial: trial, Actor: actor}
	var e events.Event
	if actor == events.Server {
		d, err := events.NewDecision(stamp, events.Aggregate{Run: run, Trial: trial}, body)
		if err != nil && b.err == nil {
			b.err = err
		}
		e = d.Event
	} else {
		f, err := events.NewFact(stamp, scope, body)
		if err != nil && b.err == nil {
			b.err = err
		}
		e = f.Event
	}
	b.log = append(b.log, events.Recorded{Event: e, Sequence: seq, Stored: at.Add(time.Millisecond)})
}

// hostile is a name that each form could take for markup.
const hostile = "<script>alert(1)</script>\"'|`*_[x](https://evil.example)\n| a | b |\x1b[31m\u202etxt.exe www.evil.example a@b.example &amp; </style><img src=x onerror=alert(1)>"

// hostileReport has that name in every place.
func hostileReport() Report {
	by := By{Principal: hostile, Source: hostile}
	return Report{
		Store: hostile, Run: hostile, AsOf: 9, Proven: hostile,
		Jobs:        []Job{{ID: hostile, By: by, Host: hostile, Command: []string{hostile}, Flags: []string{hostile}, Resume: hostile, EndedSeq: 3, Reason: hostile}},
		Trials:      []Trial{{Name: hostile, Status: hostile, Message: hostile, Config: map[string]any{hostile: hostile}, Parent: hostile, Head: hostile, Attempts: []Attempt{{Job: hostile, Backend: hostile, Resume: hostile, Reason: hostile}}}},
		Origins:     []Origin{{Of: hostile, How: "forked", Ref: hostile, State: hostile, Manifest: hostile}, {Of: hostile, How: "imported", From: hostile}, {Of: hostile, How: "forked", Unknown: hostile}},
		Checkpoints: []Checkpoint{{Trial: hostile, ID: hostile, State: "committed", Parent: hostile, Manifest: hostile, Tags: []string{hostile}, Pinned: true, DeletedSeq: 5, Reason: hostile}},
		Restores:    []Restore{{Trial: hostile, By: by, Checkpoint: hostile, Outcome: "failed", Tier: hostile, Error: hostile}},
		Decisions:   []Decision{{Sequence: 1, By: by, Trial: hostile, Kind: hostile, Subject: hostile, Detail: hostile}},
	}
}

// tags are the elements of a page, with their attributes.
var tags = regexp.MustCompile(`<[^>]*>`)

// TestHostileNames: names from a log are never markup, a row or a control character.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	var page, mark bytes.Buffer
	plain := hostileReport()
	if err := plain.HTML(&page); err != nil {
		t.Fatal(err)
	}
	if err := plain.Markdown(&mark); err != nil {
		t.Fatal(err)
	}
	for _, tag := range tags.FindAllString(page.String(), -1) {
		if strings.Contains(tag, "script") || strings.Contains(tag, "img") || strings.Contains(tag, "onerror") || strings.Contains(tag, "href") {
			t.Errorf("the page has the tag %s", tag)
		}
	}
	if n := strings.Count(page.String(), "</style>"); n != 1 {
		t.Errorf("the page has %d ends of a style", n)
	}
	for form, text := range map[string]string{"html": page.String(), "md": mark.String()} {
		for _, r := range "\x1b\u202e" {
			if strings.ContainsRune(text, r) {
				t.Errorf("%s has the character %U", form, r)
			}
		}
	}
	for _, bad := range []string{"<script", "https://", "www.evil", "\n| a "} {
		if strings.Contains(mark.String(), bad) {
			t.Errorf("the Markdown has %q", bad)
		}
	}
	if link := regexp.MustCompile(`[^\\]\]\(`).FindString(mark.String()); link != "" {
		t.Errorf("the Markdown has the link %q", link)
	}
	cells := regexp.MustCompile(`[^\\]\|`)
	last := 0
	for line := range strings.Lines(mark.String()) {
		n := 0
		if strings.HasPrefix(line, "|") {
			n = len(cells.FindAllString(line, -1))
			if last > 0 && n != last {
				t.Errorf("a row of %d cells in a table of %d: %s", n, last, line)
			}
		}
		last = n
	}
}

// TestPageNeedsNothing: the page has no script and names no other resource, and its policy
// allows its style by the style's digest.
func TestPageNeedsNothing(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("testdata", "killed.html"))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"<script", "<link", "<img", "url(", "@import", " style=", "src=", "href="} {
		if bytes.Contains(text, []byte(bad)) {
			t.Errorf("the page has %q", bad)
		}
	}
	if !strings.Contains(policy(), "default-src 'none'") || !strings.Contains(policy(), "sha256-") {
		t.Errorf("policy %q", policy())
	}
	if strings.ContainsRune(style, '<') {
		t.Error("the style could end itself")
	}
}
