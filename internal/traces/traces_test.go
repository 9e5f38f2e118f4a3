package traces

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/projections"
)

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(seconds float64) time.Time { return begin.Add(time.Duration(seconds * float64(time.Second))) }

func s(v float64) *float64 { return &v }

// check fails unless a trace is a tree of spans whose children are within their parents.
func check(t interface{ Errorf(string, ...any) }, tr Trace) {
	byID := map[[8]byte]Span{}
	for i, sp := range tr.Spans {
		if _, twice := byID[sp.ID]; twice || sp.ID == ([8]byte{}) {
			t.Errorf("span %q has the ID %x of another, or none", sp.Name, sp.ID)
		}
		parent, known := byID[sp.Parent]
		switch {
		case (i == 0) != (sp.Parent == [8]byte{}), i > 0 && !known:
			t.Errorf("span %d %q has the parent %x", i, sp.Name, sp.Parent)
		case sp.Until.Before(sp.From):
			t.Errorf("span %q ends %s before it begins", sp.Name, sp.From.Sub(sp.Until))
		case i > 0 && (sp.From.Before(parent.From) || sp.Until.After(parent.Until)):
			t.Errorf("span %q, %s to %s, is not within %q, %s to %s", sp.Name, sp.From, sp.Until, parent.Name, parent.From, parent.Until)
		}
		byID[sp.ID] = sp
	}
}

// lines prints a trace: path, begin and end in seconds, why it failed.
func lines(tr Trace) (out []string) {
	paths := map[[8]byte]string{}
	for _, sp := range tr.Spans {
		path := sp.Name
		if above := paths[sp.Parent]; above != "" {
			path = above + "/" + sp.Name
		}
		paths[sp.ID] = path
		line := fmt.Sprintf("%s %g-%g", path, sp.From.Sub(begin).Seconds(), sp.Until.Sub(begin).Seconds())
		for _, m := range sp.Moments {
			line += fmt.Sprintf(" %s@%g", m.Name, m.At.Sub(begin).Seconds())
		}
		if sp.Failed != "" {
			line += " failed: " + sp.Failed
		}
		out = append(out, line)
	}
	return out
}

func write(rank int, sealed, completed float64, phases ...*float64) projections.SaveWrite {
	w := projections.SaveWrite{Write: projections.Write{Rank: rank, SealedSeq: 11, SealedStored: at(sealed)}, Node: 0}
	if completed > 0 {
		w.CompletedSeq, w.CompletedStored = 12, at(completed)
	}
	phases = append(phases, make([]*float64, 6)...)
	w.Waited, w.Copied, w.Queued, w.Digest, w.Write.Write, w.Sync = phases[0], phases[1], phases[2], phases[3], phases[4], phases[5]
	return w
}

func saveOf(writes ...projections.SaveWrite) projections.Save {
	return projections.Save{
		Checkpoint: projections.Checkpoint{
			ID: "step-10.a1", Run: "bert", Trial: "main", Name: "step-10", Step: 10, Attempt: 1, WorldSize: len(writes), BegunSeq: 10,
			BegunStored: at(0), StagedStored: at(3), ManifestTook: s(0.5),
		},
		Writes: writes,
	}
}

// TestSave checks where the spans of saves lie.
func TestSave(t *testing.T) {
	t.Parallel()
	committed := End{Sequence: 20, Stored: at(10)}
	for _, c := range []struct {
		name string
		save projections.Save
		end  End
		want []string
	}{
		{
			"everything is measured, and the log has the completion a second later",
			saveOf(write(0, 3, 9, s(0.5), s(1.5), s(1), s(1), s(2), s(1))), committed,
			[]string{
				"save 0-10 staged@3", "save/rank 0 1-9 sealed@3", "save/rank 0/wait 1-1.5", "save/rank 0/copy 1.5-3", "save/rank 0/queue 3-4",
				"save/rank 0/write 4-7", "save/rank 0/sync 7-8", "save/rank 0/report 8-9", "save/commit 9.5-10",
			},
		},
		{
			"the seal is stored late: the write's phases tell when it was",
			saveOf(write(0, 6, 7, s(0), s(1), s(1), nil, s(2), s(1))), committed,
			[]string{"save 0-10 staged@3", "save/rank 0 2-7 sealed@3", "save/rank 0/copy 2-3", "save/rank 0/queue 3-4", "save/rank 0/write 4-6", "save/rank 0/sync 6-7", "save/commit 9.5-10"},
		},
		{
			"the rank waited for a slot before the log had the begin",
			saveOf(write(0, 1, 9, s(2), s(0.5))), committed,
			[]string{"save -1.5-10 staged@3", "save/rank 0 -1.5-9 sealed@1", "save/rank 0/wait -1.5-0.5", "save/rank 0/copy 0.5-1", "save/commit 9.5-10"},
		},
		{
			"another process wrote what the rank had sealed",
			saveOf(write(0, 3, 9, s(0), s(1), nil, s(1), s(2), s(0.5))), committed,
			[]string{"save 0-10 staged@3", "save/rank 0 2-9 sealed@3", "save/rank 0/copy 2-3", "save/rank 0/write 5.5-8.5", "save/rank 0/sync 8.5-9", "save/commit 9.5-10"},
		},
		{
			"an older version measured nothing",
			saveOf(write(0, 3, 9)), committed,
			[]string{"save 0-10 staged@3", "save/rank 0 3-9 sealed@3", "save/commit 9.5-10"},
		},
		{
			"aborted: what the log has later is left out",
			saveOf(write(0, 3, 9, nil, s(1), s(1), nil, s(2), s(1))),
			End{Sequence: 11, Stored: at(4), Aborted: true, Reason: "no room"},
			[]string{"save 0-4 staged@3 failed: no room", "save/rank 0 2-3 sealed@3", "save/rank 0/copy 2-3"},
		},
		{
			"the rows of the ranks are gone",
			saveOf(), committed,
			[]string{"save 0-10 staged@3", "save/commit 9.5-10"},
		},
	} {
		got := OfSave("store", c.save, c.end)
		check(t, got)
		if !slices.Equal(lines(got), c.want) {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, strings.Join(lines(got), "\n"), strings.Join(c.want, "\n"))
		}
	}
	failed := write(1, 3, 0, nil, s(1))
	failed.FailedSeq, failed.FailedStored, failed.Error = 13, at(5), "disk full"
	got := OfSave("store", saveOf(failed), End{Sequence: 20, Stored: at(6), Aborted: true, Reason: "rank 1: disk full"})
	check(t, got)
	if want := []string{"save 0-6 staged@3 failed: rank 1: disk full", "save/rank 1 2-5 sealed@3 failed: disk full", "save/rank 1/copy 2-3"}; !slices.Equal(lines(got), want) {
		t.Errorf("%q", lines(got))
	}
}

// TestLoad checks where the spans of loads lie.
func TestLoad(t *testing.T) {
	t.Parallel()
	row := projections.Restore{Attempt: 2, Load: 1, Checkpoint: "step-10.a1", BegunSeq: 30, BegunAt: at(100), EndedAt: at(104), Tier: "files", ResolveTook: s(0.5), ReadTook: s(3), CheckTook: s(1)}
	got := OfLoad("store", Load{Restore: row, Run: "bert", Trial: "main", Stored: at(10)})
	check(t, got)
	if want := []string{"load 5.5-10", "load/resolve 5.5-6", "load/read 6-9", "load/check 9-10"}; !slices.Equal(lines(got), want) {
		t.Errorf("%q", lines(got))
	}
	row.Tier, row.Error, row.ResolveTook, row.ReadTook, row.CheckTook = "", "block 3 is damaged", nil, nil, nil
	failed := OfLoad("store", Load{Restore: row, Run: "bert", Trial: "main", Stored: at(10)})
	check(t, failed)
	if want := []string{"load 6-10 failed: block 3 is damaged"}; !slices.Equal(lines(failed), want) || failed.ID != got.ID {
		t.Errorf("%q", lines(failed))
	}
}

// TestIdentity checks that the IDs follow from the store and the save alone.
func TestIdentity(t *testing.T) {
	t.Parallel()
	save := saveOf(write(0, 3, 9, s(1), s(1)))
	end := End{Sequence: 20, Stored: at(10)}
	one := OfSave("store", save, end)
	later := save
	later.Checkpoint.State, later.Writes = projections.Deleted, nil
	if other := OfSave("store", later, end); other.ID != one.ID || other.Spans[0].ID != one.Spans[0].ID {
		t.Error("the trace of a save that is deleted meanwhile is another")
	}
	seen := map[[16]byte]string{one.ID: "the save"}
	for name, change := range map[string]func(*projections.Checkpoint){
		"run":        func(c *projections.Checkpoint) { c.Run = "bert2" },
		"trial":      func(c *projections.Checkpoint) { c.Trial = "lr=1" },
		"checkpoint": func(c *projections.Checkpoint) { c.ID = "step-20.a1" },
		"sequence":   func(c *projections.Checkpoint) { c.BegunSeq++ },
		"boundary":   func(c *projections.Checkpoint) { c.Run, c.Trial = "bertm", "ain" },
	} {
		other := save
		change(&other.Checkpoint)
		id := OfSave("store", other, end).ID
		if seen[id] != "" {
			t.Errorf("another %s: the ID of %s", name, seen[id])
		}
		seen[id] = name
	}
	if id := OfSave("other", save, end).ID; seen[id] != "" {
		t.Errorf("another store: the ID of %s", seen[id])
	}
	if id := OfLoad("store", Load{Run: "bert", Trial: "main"}).ID; seen[id] != "" {
		t.Errorf("a load: the ID of %s", seen[id])
	}
}

// TestManyRanks checks that of many ranks the failed and the slowest are shown, in order, and the others
// counted.
func TestManyRanks(t *testing.T) {
	t.Parallel()
	var writes []projections.SaveWrite
	for rank := range 1000 {
		w := write(rank, 3, 9, nil, s(1), s(0), nil, s(float64(rank%100)/100), nil)
		if rank == 500 {
			w.CompletedSeq, w.FailedSeq, w.FailedStored, w.Error = 0, 13, at(5), "disk full"
		}
		writes = append(writes, w)
	}
	got := OfSave("store", saveOf(writes...), End{Sequence: 20, Stored: at(10)})
	check(t, got)
	var ranks []int64
	for _, sp := range got.Spans {
		for _, a := range sp.Attributes {
			if a.Key == "ckptstore.rank" {
				ranks = append(ranks, a.Value.(int64))
			}
			if a.Key == "ckptstore.ranks_omitted" && a.Value != int64(1000-slowestRanks) {
				t.Errorf("%v ranks are omitted", a.Value)
			}
		}
	}
	if len(ranks) != slowestRanks || !slices.IsSorted(ranks) || !slices.Contains(ranks, 500) || !slices.Contains(ranks, 999) || slices.Contains(ranks, 0) {
		t.Errorf("ranks %v", ranks)
	}
}

// TestText checks the bound of texts.
func TestText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		in := string(rapid.SliceOfN(rapid.Byte(), 0, 4*maxText).Draw(t, "bytes"))
		if rapid.Bool().Draw(t, "long runes") {
			in = strings.Repeat("ö€😀", rapid.IntRange(0, maxText).Draw(t, "times")) + in
		}
		if out := Text(in); !utf8.ValidString(out) || len(out) > maxText+len("…") {
			t.Errorf("%d bytes, valid: %v", len(out), utf8.ValidString(out))
		}
	})
}

// TestAnyTimes checks that a trace is a tree whose spans lie within their parents, whatever the clock of
// the log and the durations are.
func TestAnyTimes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		moment := func(name string) time.Time {
			if rapid.IntRange(0, 5).Draw(t, name+" is zero") == 0 {
				return time.Time{}
			}
			return at(rapid.Float64Range(-20, 20).Draw(t, name))
		}
		duration := func(name string) *float64 {
			if rapid.Bool().Draw(t, name+" is unknown") {
				return nil
			}
			return s(rapid.OneOf(rapid.Float64Range(0, 10), rapid.Float64()).Draw(t, name))
		}
		sequence := func(name string) uint64 { return rapid.Uint64Range(0, 30).Draw(t, name) }
		var writes []projections.SaveWrite
		for rank := range rapid.IntRange(0, 3).Draw(t, "ranks") {
			w := write(rank, 0, 0, duration("waited"), duration("copied"), duration("queued"), duration("digest"), duration("write"), duration("sync"))
			w.SealedSeq, w.CompletedSeq, w.FailedSeq = sequence("sealed"), sequence("completed"), sequence("failed")
			// The log has a time for each event.
			w.SealedStored, w.CompletedStored, w.FailedStored = at(rapid.Float64Range(-20, 20).Draw(t, "s")), at(rapid.Float64Range(-20, 20).Draw(t, "c")), at(rapid.Float64Range(-20, 20).Draw(t, "f"))
			writes = append(writes, w)
		}
		save := saveOf(writes...)
		save.Checkpoint.BegunStored, save.Checkpoint.StagedStored, save.Checkpoint.ManifestTook = moment("begun"), moment("staged"), duration("manifest")
		end := End{Sequence: 20, Stored: at(rapid.Float64Range(-20, 20).Draw(t, "end")), Aborted: rapid.Bool().Draw(t, "aborted")}
		check(t, OfSave("store", save, end))
		check(t, OfLoad("store", Load{Stored: end.Stored, Restore: projections.Restore{
			BegunAt: moment("begun"), EndedAt: moment("ended"), ResolveTook: duration("resolve"), ReadTook: duration("read"), CheckTook: duration("check"),
		}}))
	})
}
