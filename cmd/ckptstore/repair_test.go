package main

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

// TestRepairVerifiesWhatWasCommittedMeanwhile: a damaged checkpoint that is committed
// after the verification is found at the end of the repair.
func TestRepairVerifiesWhatWasCommittedMeanwhile(t *testing.T) {
	dir := t.TempDir()
	header := `{"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}`
	file := append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), bytes.Repeat([]byte{7}, 4096)...)
	from := filepath.Join(dir, "w.safetensors")
	if err := os.WriteFile(from, file, 0o600); err != nil {
		t.Fatal(err)
	}
	a := &app{Console: &console.Console{Out: io.Discard, Err: io.Discard, Format: "table", Quiet: true}, location: filepath.Join(dir, "store"), wait: 10 * time.Second}
	save := func(name string) {
		var out bytes.Buffer
		if code := run(t.Context(), []string{"import", from, "--run", name, "--step", "1", "-q", "--store", a.location}, &out, &out); code != exitOK {
			t.Fatalf("import: exit code %d: %s", code, &out)
		}
	}
	hurt := func(name string) {
		f, err := os.OpenFile(filepath.Join(a.location, "data", name, "main", "step-1.a1", "r00000.safetensors"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte{8}, 4096+9); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	save("a")
	save("b")
	hurt("a")
	s, err := store.Open(t.Context(), a.options())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	for _, refs := range [][]string{nil, {"a"}} {
		before, err := verifyTargets(t.Context(), s, nil)
		if err != nil {
			t.Fatal(err)
		}
		targets, err := verifyTargets(t.Context(), s, refs)
		if err != nil {
			t.Fatal(err)
		}
		reports, err := s.VerifyAll(t.Context(), targets, store.VerifyOptions{})
		if err != nil {
			t.Fatal(err)
		}
		late := []string{"c", "d"}[len(refs)]
		save(late)
		hurt(late)
		var out verified
		targets, reports, err = a.repairAndVerify(t.Context(), s, before, targets, reports, &out)
		if err != nil || len(out.Repaired) != 1 || len(targets) != len(reports) {
			t.Fatalf("%+v, %d targets, %d reports, %v", out, len(targets), len(reports), err)
		}
		want := map[string]bool{"a": true, late: false}
		if len(refs) == 0 {
			want["b"] = true
		}
		got := map[string]bool{}
		for i, c := range targets {
			got[c.Run] = reports[i].Clean()
		}
		if len(got) != len(want) || len(targets) != len(want) {
			t.Errorf("verified are %v, want %v", got, want)
		}
		for run, is := range want {
			if got[run] != is {
				t.Errorf("%s: clean is %v, want %v", run, got[run], is)
			}
		}
		hurt("a")
	}
}
