package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/storm/check"
)

// TestMain runs a worker if a trainer of a test has started it as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "worker" {
		if err := runWorker(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// calmStore returns a store in which one run of two ranks has saved undisturbed, and
// some of whose checkpoints were deleted since.
func calmStore(t *testing.T) (o check.Options) {
	t.Helper()
	dir := t.TempDir()
	bin := filepath.Join(dir, "bin")
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-w", "-o", bin+"/", "../../cmd/ckptstore", "../../cmd/trainer")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	runtimeDir, err := os.MkdirTemp("/tmp", "ck") //nolint:usetesting // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runtimeDir) })
	o = check.Options{
		Bin: bin, Store: filepath.Join(dir, "store"), Journals: filepath.Join(dir, "acks"), Settled: true,
		Env: append(os.Environ(), "XDG_RUNTIME_DIR="+runtimeDir),
	}
	if err := os.Mkdir(o.Journals, 0o700); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"trainer", "run", "-q", "--store", o.Store, "--name=two", "--nproc=2", "--", self, "worker", "--acks", o.Journals, "--every", "4", "--more", "16"},
		{"trainer", "run", "-q", "--store", o.Store, "--name=two", "--nproc=2", "--", self, "worker", "--acks", o.Journals, "--every", "4", "--more", "8"},
		{"ckptstore", "gc", "--store", o.Store, "--policy", "last=4", "--apply", "-q"},
	} {
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, args[0]), args[1:]...)
		cmd.Env = o.Env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	return o
}

// edit changes a file.
func edit(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, change(data), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func move(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

// TestCheckerReports damages a store, or its journals, in every way that a storm looks
// for, and expects each damage to be found.
func TestCheckerReports(t *testing.T) {
	t.Parallel()
	whole := calmStore(t)
	swap := func(t *testing.T, a, b string) {
		move(t, a, a+".moved")
		move(t, b, a)
		move(t, a+".moved", b)
	}
	newLine := func(t *testing.T, o check.Options, l check.Line) {
		l.Run, l.World = "two", 2
		text, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		edit(t, filepath.Join(o.Journals, check.JournalName("two", 0)), func(data []byte) []byte { return append(append(data, text...), '\n') })
	}
	for _, c := range []struct {
		name       string
		damage     func(t *testing.T, o check.Options, step func(int) string)
		want       []string // each is in one of the findings
		lost, torn int
		export     bool
	}{
		{name: "nothing is wrong", export: true},
		{
			name: "one bit of a file",
			damage: func(t *testing.T, _ check.Options, step func(int) string) {
				edit(t, filepath.Join(step(24), "r00001.safetensors"), func(data []byte) []byte {
					data[len(data)-100] ^= 0x10
					return data
				})
			},
			want: []string{"two@step-24.a2: rank 1's file: "}, torn: 1,
		},
		{
			name: "one bit of a file, by an export",
			damage: func(t *testing.T, _ check.Options, step func(int) string) {
				edit(t, filepath.Join(step(24), "r00001.safetensors"), func(data []byte) []byte {
					data[len(data)-100] ^= 0x10
					return data
				})
			},
			want: []string{"two@step-24.a2: ckptstore export two@step-24.a2", "two@step-24.a2: rank 1's file: "}, torn: 1, export: true,
		},
		{
			name: "one bit of what checkpoints have in common",
			damage: func(t *testing.T, _ check.Options, step func(int) string) {
				linked, err := filepath.Glob(filepath.Join(step(24), "*.link"))
				if err != nil || len(linked) == 0 {
					t.Fatalf("no linked files in %s: %v", step(24), err)
				}
				edit(t, linked[0], func(data []byte) []byte {
					data[8192] ^= 0x80
					return data
				})
			},
			want: []string{"two@step-24.a2: rank 0: frozen@0 is neither"}, torn: 3,
		},
		{
			name: "a directory is gone",
			damage: func(t *testing.T, _ check.Options, step func(int) string) {
				if err := os.RemoveAll(step(20)); err != nil {
					t.Fatal(err)
				}
			},
			want: []string{"two@step-20.a2 is listed, and has no receipt", "two@step-20.a2: open "}, torn: 1,
		},
		{
			name: "an acknowledgement of what never was",
			damage: func(t *testing.T, o check.Options, _ func(int) string) {
				newLine(t, o, check.Line{Kind: check.Ack, Attempt: 2, Checkpoint: "step-28.a2", Step: 28})
			},
			want: []string{"two@step-28.a2 was acknowledged to rank 0 of two, and its commit is not in the log"}, lost: 1,
		},
		{
			name: "two ranks' files are swapped",
			damage: func(t *testing.T, _ check.Options, step func(int) string) {
				swap(t, filepath.Join(step(12), "r00000.safetensors"), filepath.Join(step(12), "r00001.safetensors"))
			},
			want: []string{"two@step-12.a1: rank 0's file: value rng: other bytes", "two@step-12.a1: rank 1: "}, torn: 1,
		},
		{
			name: "two steps' files are swapped",
			damage: func(t *testing.T, _ check.Options, step func(int) string) {
				swap(t, filepath.Join(step(20), "r00000.safetensors"), filepath.Join(step(24), "r00000.safetensors"))
			},
			want: []string{"two@step-20.a2: rank 0's file: moving@0,0", "two@step-24.a2: rank 0's file: moving@0,0"}, torn: 2,
		},
		{
			name: "a rank goes back",
			damage: func(t *testing.T, o check.Options, _ func(int) string) {
				newLine(t, o, check.Line{Kind: check.Resume, Attempt: 3, Checkpoint: "step-20.a2", Step: 20})
			},
			want: []string{"two.0.jsonl: attempt 3 resumes step 20, although step 24 was acknowledged before"},
		},
		{
			name: "a rank begins from nothing",
			damage: func(t *testing.T, o check.Options, _ func(int) string) {
				newLine(t, o, check.Line{Kind: check.Fresh, Attempt: 3})
			},
			want: []string{"two.0.jsonl: attempt 3 begins from nothing, although step 24 was acknowledged before"},
		},
		{
			name: "what no rank has saved",
			damage: func(t *testing.T, o check.Options, _ func(int) string) {
				edit(t, filepath.Join(o.Journals, check.JournalName("two", 1)), func(data []byte) []byte {
					return bytes.ReplaceAll(data, []byte(check.Saving), []byte("other"))
				})
			},
			want: []string{"two@step-24.a2 is listed, and rank 1 never saved step 24 in attempt 2"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := whole
			dir := t.TempDir()
			for _, part := range []*string{&o.Store, &o.Journals} {
				to := filepath.Join(dir, filepath.Base(*part))
				if out, err := exec.CommandContext(t.Context(), "cp", "-a", *part, to).CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				*part = to
			}
			if c.damage != nil {
				c.damage(t, o, func(step int) string {
					return filepath.Join(o.Store, "data", "two", "main", fmt.Sprintf("step-%d.a%d", step, 1+step/17))
				})
			}
			if c.export {
				o.Scratch = dir
			}
			got, err := check.Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if got.Acknowledged < 6 || got.Deleted != 2 || got.Listed != 4 || got.Resumes < 2 || got.BytesRead == 0 || c.export && c.torn == 0 && got.Exports != 4 {
				t.Errorf("%+v: the check means nothing", got)
			}
			if got.Lost != c.lost || got.Torn != c.torn || len(c.want) == 0 && len(got.Findings) > 0 {
				t.Errorf("%d lost, want %d; %d torn, want %d; %q", got.Lost, c.lost, got.Torn, c.torn, got.Findings)
			}
			for _, want := range c.want {
				if !slices.ContainsFunc(got.Findings, func(f string) bool { return strings.HasPrefix(f, want) }) {
					t.Errorf("no finding begins with %q: %q", want, got.Findings)
				}
			}
		})
	}
}
