package jetlog

import (
	"errors"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

func TestCursor(t *testing.T) {
	l, s := newLog(t)
	other := reopen(t, s)
	if _, err := l.Append(t.Context(), factsOf(t, 10)...); err != nil {
		t.Fatal(err)
	}
	if list, err := l.ListCursors(t.Context()); err != nil || len(list) != 0 {
		t.Fatalf("before the first: %v, %v", list, err)
	}
	const name = "alerts *>./x" // not a legal key
	open := func(l *Log, want uint64) *Cursor {
		t.Helper()
		c, err := l.Cursor(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if c.Sequence() != want {
			t.Fatalf("the cursor is at %d, want %d", c.Sequence(), want)
		}
		return c
	}
	move := func(c *Cursor, to uint64) {
		t.Helper()
		if err := c.Move(t.Context(), to); err != nil {
			t.Fatal(err)
		}
	}
	first, second := open(l, 0), open(other, 0)
	move(first, 3)
	move(first, 7)
	if err := second.Move(t.Context(), 4); !errors.Is(err, ErrCursorMoved) {
		t.Fatalf("a second subscriber moved it: %v", err)
	}
	// Written, but not acknowledged.
	first.revision--
	move(first, 8)

	second = open(other, 8)
	move(second, 9)
	if err := first.Move(t.Context(), 10); !errors.Is(err, ErrCursorMoved) {
		t.Fatalf("the first moved it again: %v", err)
	}
	list, err := l.ListCursors(t.Context())
	if err != nil || len(list) != 1 || list[0].Name != name || list[0].Sequence != 9 || list[0].Moved.IsZero() {
		t.Fatalf("%+v, %v", list, err)
	}
	for _, want := range []bool{true, false} {
		if found, err := l.RemoveCursor(t.Context(), name); err != nil || found != want {
			t.Fatalf("removed is %v, want %v: %v", found, want, err)
		}
	}
	if err := second.Move(t.Context(), 10); !errors.Is(err, ErrCursorMoved) {
		t.Fatalf("it was removed: %v", err)
	}
	move(open(l, 0), 2) // a new cursor of that name
	if _, err := l.Cursor(t.Context(), ""); err == nil {
		t.Error("a cursor without a name")
	}
}

func TestLatest(t *testing.T) {
	l, _ := newLog(t)
	for filter, want := range map[string]uint64{
		events.Filter: 1, "ckpt.*.*.*.store.*": 1, "ckpt.*.*.*.gpu.*": 0,
	} {
		if got, err := l.Latest(t.Context(), filter); err != nil || got != want {
			t.Errorf("%s: %d, want %d: %v", filter, got, want, err)
		}
	}
}
