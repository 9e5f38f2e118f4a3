package projections

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// Memory behaves like a sorted map.
func TestMemoryIsAnOrderedMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, model := NewMemory(), map[string]string{}
		keys := rapid.StringOfN(rapid.RuneFrom([]rune("abc")), 0, 6, -1)
		// Enough rows to split blocks: a run of neighbours, inserted in either order.
		size := rapid.SampledFrom([]int{0, 10, blockRows, 4 * blockRows}).Draw(t, "size")
		down := rapid.Bool().Draw(t, "down")
		for i := range size {
			n := uint64(i)
			if down {
				n = ^n
			}
			k := number([]byte("b"), n)
			set(t, m, model, string(k), "x")
		}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			k := keys.Draw(t, "key")
			switch rapid.IntRange(0, 2).Draw(t, "op") {
			case 0:
				set(t, m, model, k, keys.Draw(t, "value"))
			case 1:
				if err := m.Delete([]byte(k)); err != nil {
					t.Fatal(err)
				}
				delete(model, k)
			case 2:
				lo, hi := k, keys.Draw(t, "hi")
				compare(t, m, model, []byte(lo), []byte(hi))
			}
			value, err := m.Get([]byte(k))
			want, has := model[k]
			if err != nil || (value != nil) != has || string(value) != want {
				t.Fatalf("get %q is %q, %v, want %q, %v", k, value, err, want, has)
			}
		}
		compare(t, m, model, nil, nil)
		if m.Len() != len(model) {
			t.Fatalf("len is %d, want %d", m.Len(), len(model))
		}
		for k := range model {
			if err := m.Delete([]byte(k)); err != nil {
				t.Fatal(err)
			}
		}
		compare(t, m, nil, nil, nil)
	})
}

func set(t *rapid.T, m *Memory, model map[string]string, k, v string) {
	key, value := []byte(k), []byte(v)
	if err := m.Set(key, value); err != nil {
		t.Fatal(err)
	}
	for i := range key {
		key[i] = '!' // the table must have its own copy
	}
	for i := range value {
		value[i] = '!'
	}
	model[k] = v
}

func compare(t *rapid.T, m *Memory, model map[string]string, lo, hi []byte) {
	var want, got []string
	for _, k := range slices.Sorted(maps.Keys(model)) {
		if k >= string(lo) && (hi == nil || k < string(hi)) {
			want = append(want, k+"="+model[k])
		}
	}
	err := m.Scan(lo, hi, func(k, v []byte) error {
		got = append(got, string(k)+"="+string(v))
		return nil
	})
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("scan [%q, %q) is %q, %v, want %q", lo, hi, got, err, want)
	}
}

func TestScanEndsWithTheVisitsError(t *testing.T) {
	m := NewMemory()
	for _, k := range []string{"a", "b"} {
		if err := m.Set([]byte(k), nil); err != nil {
			t.Fatal(err)
		}
	}
	enough, visits := errors.New("enough"), 0
	err := m.Scan(nil, nil, func(_, _ []byte) error { visits++; return enough })
	if !errors.Is(err, enough) || visits != 1 {
		t.Fatalf("scan returned %v after %d visits", err, visits)
	}
}

// Two tables are equal exactly if their digests are: bytes cannot move
// between key and value, or between rows.
func TestDigestSeparatesRows(t *testing.T) {
	tables := [][][2]string{
		{}, {{"a", ""}}, {{"a", "b"}}, {{"ab", ""}}, {{"a", ""}, {"b", ""}}, {{"a", "b"}, {"c", ""}}, {{"a", ""}, {"bc", ""}},
	}
	seen := map[[32]byte]int{}
	for i, rows := range tables {
		m := NewMemory()
		for _, r := range rows {
			if err := m.Set([]byte(r[0]), []byte(r[1])); err != nil {
				t.Fatal(err)
			}
		}
		sum, err := Digest(m)
		if err != nil {
			t.Fatal(err)
		}
		if j, ok := seen[sum]; ok {
			t.Errorf("tables %v and %v have the same digest", rows, tables[j])
		}
		seen[sum] = i
	}
}

func TestAfterIsTheEndOfAPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefix := rapid.SliceOfN(rapid.Byte(), 1, 4).Draw(t, "prefix")
		k := rapid.SliceOfN(rapid.Byte(), 0, 6).Draw(t, "key")
		if rapid.Bool().Draw(t, "inside") {
			k = append(bytes.Clone(prefix), k...)
		}
		hi := after(prefix)
		inside := bytes.Compare(k, prefix) >= 0 && (hi == nil || bytes.Compare(k, hi) < 0)
		if inside != bytes.HasPrefix(k, prefix) {
			t.Fatalf("%x in [%x, %x) is %v", k, prefix, hi, inside)
		}
	})
}

// A clone and its original change apart from each other.
func TestClonesAreApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tables, models := []*Memory{NewMemory()}, []map[string]string{{}}
		size := rapid.SampledFrom([]int{0, 5, 2 * blockRows}).Draw(t, "size")
		for i := range size {
			set(t, tables[0], models[0], string(number([]byte("b"), uint64(i))), "x")
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			i := rapid.IntRange(0, len(tables)-1).Draw(t, "table")
			k := string(number([]byte("b"), uint64(rapid.IntRange(0, size+10).Draw(t, "key"))))
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0:
				tables, models = append(tables, tables[i].Clone()), append(models, maps.Clone(models[i]))
			case 1:
				if err := tables[i].Delete([]byte(k)); err != nil {
					t.Fatal(err)
				}
				delete(models[i], k)
			default:
				set(t, tables[i], models[i], k, rapid.StringN(0, 3, -1).Draw(t, "value"))
			}
		}
		for i, m := range tables {
			compare(t, m, models[i], nil, nil)
			if m.Len() != len(models[i]) {
				t.Fatalf("table %d has %d rows, want %d", i, m.Len(), len(models[i]))
			}
		}
	})
}
