package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	// hostile clears the screen and sets the clipboard of a terminal.
	hostile = "x\x1b[2J\x1b]52;c;eA==\x07\u009b31m\u202e\x7f\r\n\u2066\u2028y"
	// ghost is the name of a run that is only in the log.
	ghost = "g\x1b[2J\u009b1m\u202e\nh"
	// evil is the name of a run with a checkpoint: names without control
	// characters are allowed.
	evil = "evil\u202e"
)

// hostileStore makes a store whose log and checkpoint contain text that must not reach
// a terminal. It is in a directory of its own, in which the test may run.
func hostileStore(t *testing.T) (dir, model string) {
	t.Helper()
	root := t.TempDir()
	dir, model = filepath.Join(root, "store"), filepath.Join(root, "m\u202e.safetensors")
	header, err := json.Marshal(map[string]any{
		"w" + hostile: map[string]any{"dtype": "F32", "shape": []int{2}, "data_offsets": []int{0, 8}},
		"plain":       map[string]any{"dtype": "F32", "shape": []int{1}, "data_offsets": []int{8, 12}},
	})
	if err != nil {
		t.Fatal(err)
	}
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	if err := os.WriteFile(model, append(append(file, header...), make([]byte, 12)...), 0o600); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	for _, name := range []string{evil, "other"} {
		if code := run(t.Context(), []string{"import", model, "--run", name, "--step", "1", "-q", "--store", dir}, &said, &said); code != exitOK {
			t.Fatalf("import: exit code %d: %s", code, said.String())
		}
	}
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	last := uint64(0)
	decide := func(body events.Body) {
		t.Helper()
		d, err := events.NewDecision(store.Stamp("hostile"), events.Aggregate{Run: ghost, Trial: projections.DefaultTrial}, body)
		if err != nil {
			t.Fatal(err)
		}
		if last, err = s.Log.Decide(t.Context(), d, last); err != nil {
			t.Fatal(err)
		}
	}
	say := func(trial string, body events.Body) {
		t.Helper()
		f, err := events.NewFact(store.Stamp("hostile"), events.Scope{Run: ghost, Trial: trial, Actor: events.Node(0)}, body)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = s.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	trial := projections.DefaultTrial
	say(events.None, &events.JobStarted{Job: "job" + hostile, Host: hostile, PID: 1, Command: []string{"sh", hostile}, NProc: 1, NNodes: 1, Resume: hostile, Flags: []string{"--set=" + hostile}, Dir: "/" + hostile})
	decide(&events.TrialCreated{Config: map[string]any{hostile: hostile, "lr": 1}})
	decide(&events.GroupStarted{Attempt: 1, Job: "job" + hostile, WorldSize: 1, Backend: hostile})
	for i := range 3 {
		say(trial, &events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i + 1), Metrics: map[string]any{"loss" + hostile: float64(i), "note": hostile}})
	}
	decide(&events.CheckpointBegun{Attempt: 1, Checkpoint: "c" + hostile + ".a1", Name: "c" + hostile, Step: 1, WorldSize: 1, Participants: []int{0}})
	decide(&events.CheckpointAborted{Attempt: 1, Checkpoint: "c" + hostile + ".a1", Reason: hostile})
	say(trial, &events.WorkerExited{Attempt: 1, Code: 1, Message: hostile, Traceback: hostile})
	say(trial, &events.GPUUnhealthy{Device: hostile, Reason: hostile})
	say(trial, &events.GroupStopped{Attempt: 1, Reason: hostile, Failure: "worker"})
	decide(&events.TrialErrored{Attempt: 1, Message: hostile})
	say(events.None, &events.JobEnded{Job: "job" + hostile, ExitCode: 1, Reason: hostile})
	return dir, model
}

// obeyed returns the index of a character of a command's output that a terminal would
// interpret.
func obeyed(out string) (at int, found bool) {
	for i, r := range out {
		_, n := utf8.DecodeRuneInString(out[i:])
		if r == utf8.RuneError && n == 1 || r < 0x20 && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 ||
			slices.Contains([]rune{0x61c, 0x200e, 0x200f, 0x2028, 0x2029}, r) || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 {
			return i, true
		}
	}
	return 0, false
}

// TestHostileStoreOnATerminal runs every command on a hostile store. Their human-readable
// output has no character that a terminal interprets.
func TestHostileStoreOnATerminal(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	dir, model := hostileStore(t)
	ran := map[string]bool{}
	for _, c := range []struct {
		args []string
		says string // the part of the hostile text that is printed, if any
	}{
		{[]string{"ls"}, `evil\u202e`},
		{[]string{"ls", "--all", "-o", "wide"}, `\u202e`},
		{[]string{"ls", ghost, "--all"}, `\x1b[2J`},
		{[]string{"ls", "--offline"}, `evil\u202e`},
		{[]string{"ls", hostile}, `\x1b[2J`},
		{[]string{"show", evil}, `\x1b[2J`},
		{[]string{"show", evil, "-o", "wide"}, `\x1b[2J`},
		{[]string{"show", evil, "--reshard", "2"}, ""},
		{[]string{"show", model}, `\x1b[2J`},
		{[]string{"show", ghost + "@" + hostile}, `\x1b`},
		{[]string{"events"}, `\u202e`},
		{[]string{"events", ghost, "-o", "wide"}, ` g\x1b[2J\u009b1m\u202e\nh `},
		{[]string{"events", "--type", hostile}, `\x1b`},
		{[]string{"events", "--cursor", "c\u202e", "--run", "other"}, ""},
		{[]string{"events", "cursors"}, ""},
		{[]string{"events", "cursors", "rm", hostile}, ""},
		{[]string{"replay"}, `\u202e`},
		{[]string{"replay", "--run", ghost, "-o", "wide"}, `\u009b31m`},
		{[]string{"metrics", ghost}, `\u202e`},
		{[]string{"metrics", ghost, "--csv"}, `\u202e`},
		{[]string{"metrics", ghost, "--plot", "--metric", "loss" + hostile}, `\u202e`},
		{[]string{"metrics", ghost, "--metric", "m" + hostile}, `\u202e`},
		{[]string{"diff", ghost, evil}, `\u202e`},
		{[]string{"diff", evil + "@latest", "other@latest", "-o", "wide"}, `\u202e`},
		{[]string{"verify"}, ""},
		{[]string{"verify", "-o", "wide"}, ""},
		{[]string{"verify", "--log"}, ""},
		{[]string{"verify", model}, ""},
		{[]string{"cat", evil}, `\x1b[2J`},
		{[]string{"cat", model}, `\x1b[2J`},
		{[]string{"cat", evil, "plain", "--format", "text"}, ""},
		{[]string{"cat", evil, hostile}, `\x1b[2J`},
		{[]string{"import", model, "--run", "third\u202e", "--step", "2"}, `third\u202e`},
		{[]string{"import", "no" + hostile, "--run", "r", "--step", "2"}, `\x1b[2J`},
		{[]string{"export", evil, filepath.Join(t.TempDir(), "e\u202e"), "--format", "safetensors"}, ""},
		{[]string{"backup", filepath.Join(t.TempDir(), "b\u202e")}, ""},
		{[]string{"restore", "no" + hostile}, `\x1b[2J`},
		{[]string{"recover"}, ""},
		{[]string{"gc", evil, "--policy", "last=1"}, ""},
		{[]string{"gc", hostile, "--policy", "last=1"}, `\x1b[2J`},
		{[]string{"gc", "--staging"}, ""},
		{[]string{"pin", evil, "--reason", hostile}, ""},
		{[]string{"rm", evil}, ""},
		{[]string{"unpin", evil}, ""},
		{[]string{"tag", evil, "t\u202e"}, ""},
		{[]string{"views", "status"}, ""},
		{[]string{"views", "verify"}, ""},
		{[]string{"views", "rebuild"}, ""},
		{[]string{"jobs"}, `"g\x1b[2J\u009b1m\u202e\nh" `},
		{[]string{"jobs", ghost, "-o", "wide"}, `\x1b[2J`},
		{[]string{"nodes", ghost}, `NODE`},
		{[]string{"log-copies", "--store", hostile}, `\x1b[2J`},
		{[]string{"logs", ghost}, `\x1b[2J`},
		{[]string{"stop", ghost}, `\x1b[2J`},
		{[]string{"preempt", ghost}, `\x1b[2J`},
		{[]string{"continue", ghost, "--dry-run"}, `\x1b[2J`},
		{[]string{"ui", hostile}, `\x1b[2J`},
		{[]string{"fork", evil, "f\u202e", "--set", "k=" + "v\u202e"}, `f\u202e`},
		{[]string{"fork", hostile, hostile}, `\x1b[2J`},
		{[]string{"agent", "status"}, ""},
		{[]string{"agent", "stop"}, ""},
		{[]string{"agent", "start", "--start-timeout", "-1s"}, ""},
		{[]string{"audit", "report", ghost}, `\\x1b\[2J`},
		{[]string{"audit", "report", ghost, "--format", "html"}, `\x1b[2J`},
		{[]string{"audit", "attest", ghost, "no" + hostile, "--format", hostile}, `\x1b[2J`},
		{[]string{"audit", "prove", ghost}, `audit is off`},
		{[]string{"audit", "verify", "no" + hostile}, `\x1b[2J`},
		{[]string{"slurm", "template", "--name", hostile, "--", "x"}, `\x1b[2J`},
		{[]string{"slurm", "template", "--name", "a", "--", hostile}, `\x1b[2J`},
		{[]string{"config", "trust", "no" + hostile}, `\x1b[2J`},
		{[]string{"config", "trust", "--list"}, ""},
		{[]string{"trials", hostile}, `\x1b[2J`},
		{[]string{"access", "issue", hostile, "--users", "no" + hostile}, `\x1b[2J`},
		{[]string{"access", "revoke", hostile, "--users", "no" + hostile}, `\x1b[2J`},
		{[]string{"access", "list", "--users", "no" + hostile}, `\x1b[2J`},
		{[]string{"access", "whoami", "--store", "no" + hostile}, `\x1b[2J`},
		{[]string{"access", "whoami", "--http", "https://no" + hostile}, `\x1b[2J`},
		{[]string{"init"}, ""},
		{[]string{"serve", "--listen", hostile}, `\x1b[2J`},
		{[]string{hostile}, `\x1b[2J`},
		{[]string{"ls", "--" + hostile}, `\x1b[2J`},
		{[]string{"ls", "-o", hostile}, `\x1b[2J`},
		{[]string{"ls", "--store", "no" + hostile}, `\x1b[2J`},
		{[]string{"bench", hostile}, `\x1b[2J`},
	} {
		ran[c.args[0]] = true
		args := c.args
		if !slices.Contains(args, "--store") {
			args = append(slices.Clone(args), "--store", dir)
		}
		t.Setenv(envTrainer, os.Args[0])
		var out, errs bytes.Buffer
		code := run(t.Context(), args, &out, &errs)
		both := out.String() + errs.String()
		if at, bad := obeyed(both); bad {
			t.Errorf("%q (exit code %d) prints %q", c.args, code, both[max(0, at-40):min(len(both), at+40)])
		}
		if !strings.Contains(both, c.says) {
			t.Errorf("%q (exit code %d) does not print %s: %q", c.args, code, c.says, both)
		}
	}
	// The program's own list of commands shows that none is missing.
	var list bytes.Buffer
	run(t.Context(), []string{"__complete", ""}, &list, &bytes.Buffer{})
	for line := range strings.Lines(list.String()) {
		name, _, command := strings.Cut(line, "\t")
		if command && !ran[name] && name != "help" && name != "completion" {
			t.Errorf("%s was not run", name)
		}
	}
	if !strings.Contains(list.String(), "ls\t") {
		t.Errorf("the list of commands is %q", list.String())
	}
}

// JSON is for programs: it has the text of the log unchanged.
func TestHostileStoreInJSON(t *testing.T) {
	dir, _ := hostileStore(t)
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"metrics", ghost, "--json", "--store", dir}, &out, &errs); code != exitOK {
		t.Fatalf("exit code %d: %s", code, errs.String())
	}
	var table struct {
		Rows []struct {
			Metrics map[string]struct{ Last any }
		}
	}
	if err := json.Unmarshal(out.Bytes(), &table); err != nil {
		t.Fatal(err)
	}
	if got := table.Rows[0].Metrics["note"].Last; got != hostile {
		t.Errorf("the metric is %q in JSON, want %q", got, hostile)
	}
}

// A text is not cut within a character.
func TestBeginning(t *testing.T) {
	for text, want := range map[string]string{"": "", "abc": "abc", "abcd": "abc…", "ab€": "ab…", "abc€": "abc…", "\x80\x80\x80\x80": "…"} {
		if got := beginning(text, 3); got != want {
			t.Errorf("the beginning of %q is %q, want %q", text, got, want)
		}
	}
}
