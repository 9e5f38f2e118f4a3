package main

import (
	"encoding/json"
	"reflect"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
)

// chunk is a stored part of a tensor: rows from, of n.
func chunk(rank int, fqn string, dtype tensor.DType, shape tensor.Shape, from, n int64, content string) data.Stored {
	box := tensor.Box{Offsets: make([]int64, len(shape)), Sizes: slices.Clone(shape)}
	box.Offsets[0], box.Sizes[0] = from, n
	it := checkpoint.Item{Shard: tensor.Shard{FQN: fqn, DType: dtype, Global: shape, Box: box}}
	it.Bytes = it.Shard.Bytes()
	return data.Stored{Rank: rank, Item: it, Digest: digestOf(content)}
}

func digestOf(content string) checkpoint.Digest {
	if content == "" {
		return checkpoint.Digest{} // not known
	}
	return checkpoint.Sum([]byte(content))
}

func TestPartsOfCheckpoints(t *testing.T) {
	f32, whole := tensor.Float32, tensor.Shape{4, 2}
	halves := []data.Stored{chunk(0, "w", f32, whole, 0, 2, "top"), chunk(1, "w", f32, whole, 2, 2, "bottom")}
	for name, c := range map[string]struct {
		a, b []data.Stored
		want []string
	}{
		"the same":               {halves, halves, nil},
		"on other ranks":         {halves, []data.Stored{chunk(0, "w", f32, whole, 2, 2, "bottom"), chunk(1, "w", f32, whole, 0, 2, "top")}, nil},
		"another content":        {halves, []data.Stored{halves[0], chunk(1, "w", f32, whole, 2, 2, "other")}, []string{isContent}},
		"halves exchanged":       {halves, []data.Stored{chunk(0, "w", f32, whole, 0, 2, "bottom"), chunk(1, "w", f32, whole, 2, 2, "top")}, []string{isContent}},
		"other chunks":           {halves, []data.Stored{chunk(0, "w", f32, whole, 0, 4, "all")}, []string{isChunks}},
		"other cuts":             {halves, []data.Stored{chunk(0, "w", f32, whole, 0, 1, "top"), chunk(1, "w", f32, whole, 1, 3, "bottom")}, []string{isChunks}},
		"never read":             {halves, []data.Stored{halves[0], chunk(1, "w", f32, whole, 2, 2, "")}, []string{isUnknown}},
		"another dtype":          {halves, []data.Stored{chunk(0, "w", tensor.Int32, whole, 0, 2, "top"), chunk(1, "w", tensor.Int32, whole, 2, 2, "bottom")}, []string{isDType}},
		"another shape":          {halves, []data.Stored{chunk(0, "w", f32, tensor.Shape{2, 4}, 0, 2, "top")}, []string{isShape}},
		"another dtype and form": {halves, []data.Stored{chunk(0, "w", tensor.Int8, tensor.Shape{8}, 0, 8, "top")}, []string{isDType, isShape}},
		"added":                  {nil, halves, []string{isAdded}},
		"removed":                {halves, nil, []string{isRemoved}},
	} {
		t.Run(name, func(t *testing.T) {
			key := partKey{"tensor", "w"}
			if got := partsFrom(c.a)[key].changes(partsFrom(c.b)[key]); !slices.Equal(got, c.want) {
				t.Errorf("it differs in %q, want %q", got, c.want)
			}
		})
	}
	value := func(rank int, perRank bool, bytes int64, content string) data.Stored {
		it := checkpoint.Item{Shard: tensor.Shard{FQN: "v"}, Value: true, PerRank: perRank, Bytes: bytes}
		return data.Stored{Rank: rank, Item: it, Digest: digestOf(content)}
	}
	// A shared value may be in the file of any rank; a per-rank one is its own.
	a := partsFrom([]data.Stored{value(0, false, 3, "abc"), value(0, true, 3, "abc"), value(1, true, 3, "abd")})
	b := partsFrom([]data.Stored{value(1, false, 3, "abc"), value(0, true, 4, "abcd"), value(1, true, 3, "xyz")})
	for name, want := range map[string][]string{"v": nil, "v of rank 0": {isSize}, "v of rank 1": {isContent}} {
		key := partKey{"value", name}
		if got := a[key].changes(b[key]); !slices.Equal(got, want) {
			t.Errorf("%s differs in %q, want %q", name, got, want)
		}
	}
}

func TestDiffOfConfigurations(t *testing.T) {
	var a, b map[string]any
	for text, into := range map[string]*map[string]any{
		`{"opt":{"lr":0.1,"betas":[0.9,0.99],"none":{}},"same":1,"gone":null,"kind":{"x":1}}`: &a,
		`{"opt":{"lr":0.2,"betas":[0.9,0.98],"none":{}},"same":1,"a.b":{"":2},"kind":"x"}`:    &b,
	} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatal(err)
		}
	}
	var d compared
	d.config(a, b)
	var got []string
	for _, one := range d.Differences {
		got = append(got, one.Name+" "+one.Changes[0]+": "+configText(one, isAdded, one.A)+" → "+configText(one, isRemoved, one.B))
	}
	want := []string{
		`"a.b"."" added:  → 2`, `gone removed: null → `, `kind added:  → "x"`, `kind.x removed: 1 → `,
		`opt.betas changed: [0.9,0.99] → [0.9,0.98]`, `opt.lr changed: 0.1 → 0.2`,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("differences %q, want %q", got, want)
	}
}
