package jetlog

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// flip changes one bit of the last value of a bucket that holds text.
func flip(t *testing.T, bucket, text string) {
	t.Helper()
	blocks, err := filepath.Glob(filepath.Join(bucket, "msgs", "*.blk"))
	if err != nil || len(blocks) != 1 {
		t.Fatalf("blocks %q, %v", blocks, err)
	}
	data, err := os.ReadFile(blocks[0])
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.LastIndex(data, []byte(text))
	if at < 0 {
		t.Fatalf("%q is not in the block", text)
	}
	data[at] ^= 1
	if err := os.WriteFile(blocks[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

// A cursor whose value is gone is reported as damage when it is opened, by the list and
// by a check, and can be removed.
func TestCursorDamaged(t *testing.T) {
	for name, c := range map[string]struct {
		harm func(t *testing.T, cursors, witnesses string)
		lost []string // cursors
		stay bool     // the unreadable value blocks a removal
		says string   // found by the check; "" when nothing can be known
	}{
		"one flip": {func(t *testing.T, cursors, _ string) {
			flip(t, cursors, `{"name":"alerts"`)
		}, []string{"alerts"}, true, `bucket CKPT_CURSORS: the value of key "alerts" cannot be read`},
		"a flip without witnesses": {func(t *testing.T, cursors, witnesses string) {
			flip(t, cursors, `{"name":"alerts"`)
			remove(t, witnesses)
		}, []string{"alerts"}, true, `bucket CKPT_CURSORS: the value of key "alerts" cannot be read`},
		"a flip without the server's index": {func(t *testing.T, cursors, _ string) {
			flip(t, cursors, `{"name":"alerts"`)
			remove(t, filepath.Join(cursors, "msgs", "index.db"))
		}, []string{"alerts", "billing"}, false, `cursor "alerts": damaged cursor: it was moved, and is gone`},
		"the directory is gone": {func(t *testing.T, cursors, _ string) {
			remove(t, cursors)
		}, []string{"alerts", "billing"}, false, `cursor "billing": damaged cursor: it was moved, and is gone`},
		"a witness is flipped": {func(t *testing.T, _, witnesses string) {
			flip(t, witnesses, `{"name":"alerts"`)
		}, nil, true, `bucket CKPT_CURSOR_WITNESSES: the value of key "alerts" cannot be read`},
		"the witnesses are gone": {func(t *testing.T, _, witnesses string) {
			remove(t, witnesses)
		}, nil, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := startServer(t, dir)
			l := connectTo(t, Options{Dial: dial(s)})
			if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"alerts", "billing"} {
				cursor, err := l.Cursor(t.Context(), name)
				if err == nil {
					err = cursor.Move(t.Context(), 1)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if _, found := checkAll(t, l, CheckOptions{}); found != "" {
				t.Fatalf("before the damage: %s", found)
			}
			l.Close()
			s.Shutdown()
			streams := filepath.Join(dir, "jetstream", Account, "streams")
			c.harm(t, filepath.Join(streams, cursorStream), filepath.Join(streams, witnessStream))

			l = reopen(t, startServer(t, dir))
			if _, found := checkAll(t, l, CheckOptions{}); c.says == "" && found != "" || !strings.Contains(found, c.says) {
				t.Errorf("the check found %q, want %q", found, c.says)
			}
			for _, name := range c.lost {
				if cursor, err := l.Cursor(t.Context(), name); !errors.Is(err, ErrCursorDamaged) {
					t.Errorf("open cursor %s: %+v, %v", name, cursor, err)
				}
			}
			list, err := l.ListCursors(t.Context())
			if err != nil || len(list) != 2 {
				t.Fatalf("the list: %+v, %v", list, err)
			}
			for _, state := range list {
				if lost := strings.Contains(strings.Join(c.lost, " "), state.Name); lost != errors.Is(state.Damage, ErrCursorDamaged) {
					t.Errorf("in the list: %+v", state)
				}
			}
			for _, state := range list {
				found, err := l.RemoveCursor(t.Context(), state.Name)
				if c.stay && state.Name == "alerts" {
					if err == nil || !strings.Contains(err.Error(), "delete its directory KV_CKPT_CURSOR") {
						t.Errorf("remove %s: %v", state.Name, err)
					}
					continue
				}
				if err != nil || !found {
					t.Errorf("remove %s: %v, %v", state.Name, found, err)
				}
				if cursor, err := l.Cursor(t.Context(), state.Name); err != nil || cursor.Sequence() != 0 {
					t.Errorf("open %s after its removal: %v", state.Name, err)
				}
			}
			if c.stay {
				return
			}
			if _, found := checkAll(t, l, CheckOptions{}); found != "" {
				t.Errorf("after the removals the check found %s", found)
			}
		})
	}
}

// A log that ends before a cursor was rolled back.
func TestCursorAheadOfLog(t *testing.T) {
	l, _ := newLog(t)
	cursor, err := l.Cursor(t.Context(), "alerts")
	if err == nil {
		err = cursor.Move(t.Context(), 7)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Cursor(t.Context(), "alerts"); !errors.Is(err, ErrCursorDamaged) || !strings.Contains(err.Error(), "stands at event 7, and the log ends at 1") {
		t.Error(err)
	}
	if _, found := checkAll(t, l, CheckOptions{}); !strings.Contains(found, `cursor "alerts" stands at event 7, and the log ends at 1`) {
		t.Errorf("the check found %q", found)
	}
}

// A first move that was cut before its witness was written gets it later.
func TestCursorWitnessAfterCut(t *testing.T) {
	l, s := newLog(t)
	open := func(l *Log) *Cursor {
		t.Helper()
		cursor, err := l.Cursor(t.Context(), "alerts")
		if err != nil {
			t.Fatal(err)
		}
		return cursor
	}
	cursor := open(l)
	if _, err := cursor.kv.Create(t.Context(), "alerts", []byte(`{"name":"alerts","sequence":1,"token":"x"}`)); err != nil {
		t.Fatal(err)
	}
	if open(reopen(t, s)).Sequence() != 1 {
		t.Error("the cursor is not at 1")
	}
	if known, err := l.witnessed(t.Context(), "alerts"); err != nil || !known {
		t.Errorf("no witness: %v", err)
	}
}

// A lease whose value is gone has an unknown holder.
func TestLeaseDamaged(t *testing.T) {
	dir := t.TempDir()
	s := startServer(t, dir)
	l := connectTo(t, Options{Dial: dial(s)})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Lease(t.Context(), "job", []byte("me"), time.Minute); err != nil {
		t.Fatal(err)
	}
	l.Close()
	s.Shutdown()
	flip(t, filepath.Join(dir, "jetstream", Account, "streams", leaseStream), `"token"`)
	l = reopen(t, startServer(t, dir))
	if lease, err := l.Lease(t.Context(), "job", []byte("you"), time.Minute); err == nil || !strings.Contains(err.Error(), "its holder is unknown") {
		t.Errorf("%+v, %v", lease, err)
	}
	if _, found := checkAll(t, l, CheckOptions{}); !strings.Contains(found, `bucket CKPT_LEASES: the value of key "job" cannot be read`) {
		t.Errorf("the check found %q", found)
	}
}
