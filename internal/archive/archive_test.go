package archive

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/durable"
)

const store = "01a20465-d6d5-78b8-ab31-cb5c20f832d2"

// messages yields n messages that follow after. Every tenth is a decision in one of three
// lanes.
func messages(after uint64, n int) func(yield func(Message, error) bool) {
	return func(yield func(Message, error) bool) {
		for i := range n {
			if !yield(messageOf(after+uint64(i)+1), nil) {
				return
			}
		}
	}
}

func messageOf(seq uint64) Message {
	m := Message{
		Sequence: seq, Time: time.Unix(1_700_000_000, int64(seq)*1e6).UTC(),
		Subject: fmt.Sprintf("ckpt.run%d.main.r%d.report.metrics", seq%7, seq%2),
		Header:  fmt.Appendf(nil, "NATS/1.0\r\nNats-Msg-Id: id-%d\r\n\r\n", seq),
		Data:    bytes.Repeat([]byte{byte(seq), 'x'}, int(seq%50)),
	}
	if seq%10 == 0 {
		m.Subject = fmt.Sprintf("ckpt.run%d.main.s.checkpoint.begun", seq/10%3)
	}
	if seq%13 == 0 {
		m.Header = nil
	}
	return m
}

func same(a, b Message) bool {
	return a.Sequence == b.Sequence && a.Time.Equal(b.Time) && a.Subject == b.Subject &&
		bytes.Equal(a.Header, b.Header) && (a.Header == nil) == (b.Header == nil) && bytes.Equal(a.Data, b.Data)
}

// sealed returns an archive of n messages.
func sealed(t interface {
	Fatal(...any)
	Helper()
}, dir string, n int, limits Limits,
) Link {
	t.Helper()
	var link Link
	for link.Last < uint64(n) {
		next, err := Seal(dir, store, link, limits, messages(link.Last, n-int(link.Last)))
		if err != nil {
			t.Fatal(err)
		}
		link = next
	}
	if err := Extend(dir, store, Link{}, link); err != nil {
		t.Fatal(err)
	}
	return link
}

func opened(t *testing.T, dir string, end Link) *Archive {
	t.Helper()
	a, err := Open(dir, store, end)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// Whatever the sizes of segments, every message comes back unchanged, by sequence, by
// range and by lane.
func TestArchiveIsWhatWasSealed(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp("/dev/shm", "archive") //nolint:usetesting // hundreds of files are synced
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		n := rapid.IntRange(1, 400).Draw(rt, "messages")
		limits := Limits{Messages: rapid.IntRange(1, 100).Draw(rt, "a segment"), Bytes: rapid.Int64Range(1, 1<<14).Draw(rt, "bytes")}
		end := sealed(rt, dir, n, limits)
		a, err := Open(dir, store, end)
		if err != nil {
			rt.Fatal(err)
		}
		defer func() { _ = a.Close() }()
		from := rapid.Uint64Range(1, uint64(n)).Draw(rt, "from")
		until := rapid.Uint64Range(from, uint64(n)+5).Draw(rt, "until")
		next := from
		for m, err := range a.Read(rt.Context(), from, until) {
			if err != nil || !same(m, messageOf(next)) {
				rt.Fatalf("message %d is %+v, %v", next, m, err)
			}
			next++
		}
		if next != min(until, uint64(n))+1 {
			rt.Fatalf("%d to %d of %d end before %d", from, until, n, next)
		}
		if m, err := a.At(from); err != nil || !same(m, messageOf(from)) {
			rt.Fatalf("message %d is %+v, %v", from, m, err)
		}
		if _, err := a.At(uint64(n) + 1); !errors.Is(err, ErrNone) {
			rt.Fatalf("behind the end: %v", err)
		}
		for run := range 4 {
			lane := fmt.Sprintf("ckpt.run%d.main.s.>", run)
			head, next := uint64(0), uint64(0)
			for seq := uint64(1); seq <= uint64(n); seq++ {
				if laneOf(messageOf(seq).Subject) == lane {
					if head = seq; next == 0 && seq >= from {
						next = seq
					}
				}
			}
			if got, err := a.Head(lane); err != nil || got != head {
				rt.Fatalf("lane %s ends at %d, %v, want %d", lane, got, err, head)
			}
			if got, err := a.Latest(lane); err != nil || got != head {
				rt.Fatalf("the latest of lane %s is %d, %v, want %d", lane, got, err, head)
			}
			if got, err := a.Next(lane, from); err != nil || got != next {
				rt.Fatalf("lane %s from %d on begins at %d, %v, want %d", lane, from, got, err, next)
			}
			filter := fmt.Sprintf("ckpt.run%d.*.r1.>", run)
			last := uint64(0)
			for seq := uint64(1); seq <= uint64(n); seq++ {
				if matches(filter, messageOf(seq).Subject) {
					last = seq
				}
			}
			if got, err := a.Latest(filter); err != nil || got != last {
				rt.Fatalf("the latest of %s is %d, %v, want %d", filter, got, err, last)
			}
		}
		if err := a.Verify(rt.Context(), nil); err != nil {
			rt.Fatal(err)
		}
	})
}

// Every flipped bit of a segment and every truncation is found.
func TestEveryBit(t *testing.T) {
	dir := t.TempDir()
	end := sealed(t, dir, 60, Limits{Messages: 30, Bytes: 1 << 20})
	segments, err := list(dir)
	if err != nil || len(segments) != 2 {
		t.Fatalf("%d segments, %v", len(segments), err)
	}
	good, err := os.ReadFile(segments[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, bad []byte) {
		t.Helper()
		if err := os.WriteFile(segments[0].Path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := Open(dir, store, end)
		if err == nil {
			err = errors.Join(a.Verify(t.Context(), nil), a.Close())
		}
		if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrForeign) {
			t.Fatalf("%s: %v", what, err)
		}
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1 << (i % 8)
		check(fmt.Sprintf("bit %d of byte %d is flipped", i%8, i), bad)
		if i%7 == 0 {
			check(fmt.Sprintf("it has %d bytes", i), good[:i])
		}
	}
	check("a byte is appended", append(bytes.Clone(good), 0))
}

// The heads are derived: a missing or damaged file is written again.
func TestHeadsAreDerived(t *testing.T) {
	dir := t.TempDir()
	end := sealed(t, dir, 100, Limits{Messages: 7, Bytes: 1 << 20})
	path := filepath.Join(dir, headsName(end.Last))
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i <= len(good); i = min(i+5, max(i+1, len(good))) {
		bad := bytes.Clone(good)
		if i < len(good) {
			bad[i] ^= 0x40
			err = os.WriteFile(path, bad, 0o600)
		} else {
			err = os.Remove(path)
		}
		if err != nil {
			t.Fatal(err)
		}
		if got, err := opened(t, dir, end).Head("ckpt.run1.main.s.>"); err != nil || got != 100 {
			t.Fatalf("byte %d is changed: %d, %v", i, got, err)
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, good) {
			t.Fatalf("byte %d was changed: the file is not written again: %v", i, err)
		}
	}
}

// A segment that was sealed ahead counts only if it follows.
func TestAhead(t *testing.T) {
	dir := t.TempDir()
	limits := Limits{Messages: 10, Bytes: 1 << 20}
	end := sealed(t, dir, 20, limits)
	first, err := Seal(dir, store, end, limits, messages(20, 10))
	if err != nil {
		t.Fatal(err)
	}
	second, err := Seal(dir, store, first, limits, messages(30, 10))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Ahead(dir, store, end); err != nil || got != second {
		t.Fatalf("ahead is %v, %v, want %v", got, err, second)
	}
	if m, err := opened(t, dir, end).At(21); !errors.Is(err, ErrNone) {
		t.Fatalf("an archive that ends at 20 has %+v, %v", m, err)
	}
	// Segments of another history, and of a history that was cut short.
	if _, err := Seal(dir, store, Link{Last: 20, Digest: first.Digest}, limits, messages(20, 10)); err != nil {
		t.Fatal(err)
	}
	if got, err := Ahead(dir, store, end); err != nil || got != end {
		t.Fatalf("ahead is %v, %v, want %v", got, err, end)
	}
	all, err := list(dir)
	if err != nil || len(all) != 2 {
		t.Fatalf("%d segments are left, %v, want 2", len(all), err)
	}
	cut := filepath.Join(dir, durable.TempPrefix+"x")
	if err := os.WriteFile(cut, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(cut, time.Time{}, time.Now().Add(-2*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, durable.TempPrefix+"y"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Tidy(dir, end); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	want := []string{durable.TempPrefix + "y", segmentName(1, 10), segmentName(11, 20), segmentName(21, 30) + ".aside-1", segmentName(31, 40) + ".aside-1", headsName(20)}
	slices.Sort(want)
	if err != nil || !slices.Equal(names, want) {
		t.Fatalf("%q are left, %v, want %q", names, err, want)
	}
}

// A gap in the messages, and an error, leave no file.
func TestSealRefuses(t *testing.T) {
	dir := t.TempDir()
	broken := errors.New("broken")
	for name, of := range map[string]func(yield func(Message, error) bool){
		"a gap": func(yield func(Message, error) bool) { _ = yield(messageOf(1), nil) && yield(messageOf(3), nil) },
		"one twice": func(yield func(Message, error) bool) {
			again := messageOf(1)
			_ = yield(messageOf(1), nil) && yield(again, nil)
		},
		"another start": messages(1, 5),
		"an error":      func(yield func(Message, error) bool) { _ = yield(messageOf(1), nil) && yield(Message{}, broken) },
		"a long subject": func(yield func(Message, error) bool) {
			_ = yield(Message{Sequence: 1, Subject: strings.Repeat("x", 1<<16)}, nil)
		},
		"too large a one": func(yield func(Message, error) bool) {
			_ = yield(Message{Sequence: 1, Data: make([]byte, maxFrame)}, nil)
		},
	} {
		if link, err := Seal(dir, store, Link{}, DefaultLimits, of); err == nil || link != (Link{}) {
			t.Errorf("%s: %v, %v", name, link, err)
		}
	}
	if link, err := Seal(dir, store, Link{}, DefaultLimits, messages(0, 0)); err != nil || link != (Link{}) {
		t.Errorf("nothing: %v, %v", link, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%d files are left, %v", len(entries), err)
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	end := sealed(t, dir, 30, Limits{Messages: 10, Bytes: 1 << 20})
	for _, c := range []struct {
		name, dir, store string
		end              Link
		is               error
	}{
		{"another digest", dir, store, Link{Last: 30}, ErrDamaged},
		{"an end within a segment", dir, store, Link{Last: 25, Digest: end.Digest}, ErrDamaged},
		{"an end behind all", dir, store, Link{Last: 40, Digest: end.Digest}, ErrDamaged},
		{"another store", dir, "other", end, ErrForeign},
		{"no directory", filepath.Join(dir, "none"), store, end, ErrDamaged},
	} {
		if a, err := Open(c.dir, c.store, c.end); !errors.Is(err, c.is) {
			t.Errorf("%s: %v", c.name, err)
			if err == nil {
				_ = a.Close()
			}
		}
	}
}

func TestFilters(t *testing.T) {
	for _, c := range []struct {
		filter, subject string
		want            bool
	}{
		{"ckpt.>", "ckpt.a.main.s.x.y", true},
		{"ckpt.a.>", "ckpt.b.main.s.x.y", false},
		{"ckpt.*.main.s.>", "ckpt.b.main.s.x.y", true},
		{"ckpt.a", "ckpt.a.b", false},
		{"ckpt.a.b", "ckpt.a", false},
		{"ckpt.*", "ckpt.a", true},
		{"ckpt.>", "ckpt", false},
	} {
		if got := matches(c.filter, c.subject); got != c.want {
			t.Errorf("%s matches %s: %v", c.filter, c.subject, got)
		}
	}
	for subject, want := range map[string]string{
		"ckpt.a.main.s.group.started": "ckpt.a.main.s.>", "ckpt.a.main.r0.report.metrics": "", "ckpt._._.s.store.created": "ckpt._._.s.>", "x": "", "": "",
	} {
		if got := laneOf(subject); got != want || want != "" && !isLane(got) {
			t.Errorf("the lane of %s is %q, want %q", subject, got, want)
		}
	}
	if isLane("ckpt.*.main.s.>") || isLane("ckpt.a.main.r0.>") || isLane("ckpt.>") {
		t.Error("a filter of many lanes is taken for one")
	}
	var all []string
	for seq := uint64(1); seq < 30; seq++ {
		all = append(all, messageOf(seq).Subject)
	}
	if slices.Contains(all, "") {
		t.Error("an empty subject")
	}
}

// FuzzSegment checks that no bytes make a reader panic, or take much memory.
func FuzzSegment(f *testing.F) {
	dir := f.TempDir()
	sealed(f, dir, 20, Limits{Messages: 20, Bytes: 1 << 20})
	all, err := list(dir)
	if err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(all[0].Path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), segmentName(1, 20))
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Verify(path, store, Link{}); err == nil && !bytes.Equal(data, good) {
			t.Log("another segment of these sequences") // its digest covers it
		}
	})
}
