package tune_test

import (
	"bufio"
	"encoding/json"
	"os"
	"reflect"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/tune"
)

// TestRecordedSearch: each decision in the log of a real search, on two slots and with a tuner
// that was killed, is that of the paper's algorithm on the same reports. TUNE_LOG names the
// output of `ckptstore events --json` for another log, and TUNE_RUN its run.
func TestRecordedSearch(t *testing.T) {
	path, name := "../../projections/testdata/golden-log-search.jsonl", "digits"
	if other := os.Getenv("TUNE_LOG"); other != "" {
		path, name = other, os.Getenv("TUNE_RUN")
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	var log, of []events.Recorded
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var r events.Recorded
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		if log = append(log, r); r.Scope.Run == name {
			of = append(of, r)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	all, err := tune.Replay(name, func(yield func(events.Recorded, error) bool) {
		for _, r := range log {
			if !yield(r, nil) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all.Decisions {
		if d.Problem != "" {
			t.Errorf("event %d: %s", d.Sequence, d.Problem)
		}
		until := 0
		for until < len(of) && of[until].Sequence <= d.After {
			until++
		}
		if all.Search.PBT() {
			if want, ok := jaderberg(name, all.Search.Definition, tell(of[:until])); !ok || !reflect.DeepEqual(bare(d.SearchAssigned), bare(want)) {
				t.Errorf("event %d: %+v; the paper's rule: %+v, %v", d.Sequence, d.SearchAssigned, want, ok)
			}
			continue
		}
		trial, steps, ok := paper(all.Search.Definition, of[:until])
		if !ok || trial != d.Trial || steps != d.Steps {
			t.Errorf("event %d: trial %s to %d steps; the paper's algorithm: %s to %d, %v", d.Sequence, d.Trial, d.Steps, trial, steps, ok)
		}
	}
	board := all.Board(name, nil, nil)
	if all.Search.PBT() {
		if want, more := jaderberg(name, all.Search.Definition, tell(of)); more || !board.Over {
			t.Errorf("the search is over: %v; the paper's rule trains %+v", board.Over, want)
		}
	} else if trial, steps, more := paper(all.Search.Definition, of); more || !board.Over {
		t.Errorf("the search is over: %v; the paper's algorithm trains %q to %d", board.Over, trial, steps)
	}
	if len(all.Decisions) < len(board.Trials) || board.Best == nil {
		t.Errorf("%d decisions, best %+v", len(all.Decisions), board.Best)
	}
	t.Logf("%d decisions of %d trials in %d events; best %s with %v", len(all.Decisions), len(board.Trials), len(of), board.Best.Trial, *board.Best.Value)
}
