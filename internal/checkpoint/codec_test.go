package checkpoint_test

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

// form is one binary form, seen as bytes only.
type form struct {
	name   string
	magic  string
	sample []byte
	// again decodes data and encodes the result.
	again func(data []byte) ([]byte, error)
	draw  func(t *rapid.T) []byte
}

func again[T any](decode func([]byte) (T, error), encode func(T) []byte) func([]byte) ([]byte, error) {
	return func(data []byte) ([]byte, error) {
		v, err := decode(data)
		if err != nil {
			return nil, err
		}
		return encode(v), nil
	}
}

var forms = []form{
	{
		"local", "CKLP", checkpoint.EncodeLocal(sampleLocal), again(checkpoint.DecodeLocal, checkpoint.EncodeLocal),
		func(t *rapid.T) []byte { return checkpoint.EncodeLocal(locals().Draw(t, "local")) },
	},
	{
		"layout", "CKLY", checkpoint.EncodeLayout(sampleLayout), again(checkpoint.DecodeLayout, checkpoint.EncodeLayout),
		func(t *rapid.T) []byte { return checkpoint.EncodeLayout(layouts().Draw(t, "layout")) },
	},
	{
		"manifest", "CKMF", checkpoint.EncodeManifest(sampleManifest), again(checkpoint.DecodeManifest, checkpoint.EncodeManifest),
		func(t *rapid.T) []byte { return checkpoint.EncodeManifest(manifests().Draw(t, "manifest")) },
	},
}

func eachForm(t *testing.T, f func(t *testing.T, f form)) {
	for _, form := range forms {
		t.Run(form.name, func(t *testing.T) { f(t, form) })
	}
}

// checkDecode checks any bytes: they are refused with an offset, or
// they are the only form of their content.
func checkDecode(t interface{ Fatalf(string, ...any) }, f form, data []byte) {
	got, err := f.again(data)
	switch {
	case err != nil && !strings.HasPrefix(err.Error(), "decode "+f.name):
		t.Fatalf("error %q does not name the decoded form", err)
	case err != nil && !strings.Contains(err.Error(), "offset "):
		t.Fatalf("error %q has no offset", err)
	case err == nil && !bytes.Equal(got, data):
		t.Fatalf("%x was accepted and is encoded as %x", data, got)
	}
}

func TestCodecInverse(t *testing.T) {
	t.Run("local", rapid.MakeCheck(func(t *rapid.T) {
		want := locals().Draw(t, "local")
		got, err := checkpoint.DecodeLocal(checkpoint.EncodeLocal(want))
		equal(t, got, want, err)
	}))
	t.Run("layout", rapid.MakeCheck(func(t *rapid.T) {
		want := layouts().Draw(t, "layout")
		got, err := checkpoint.DecodeLayout(checkpoint.EncodeLayout(want))
		equal(t, got, want, err)
	}))
	t.Run("manifest", rapid.MakeCheck(func(t *rapid.T) {
		want := manifests().Draw(t, "manifest")
		got, err := checkpoint.DecodeManifest(checkpoint.EncodeManifest(want))
		equal(t, got, want, err)
	}))
}

func equal(t *rapid.T, got, want any, err error) {
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v came back as %+v", want, got)
	}
}

// Bytes that were changed somewhere are refused, or mean something else in
// the one form that means it: no two encodings have the same meaning.
func TestEncodingIsCanonical(t *testing.T) {
	eachForm(t, func(t *testing.T, f form) {
		rapid.Check(t, func(t *rapid.T) {
			data := f.draw(t)
			for range rapid.IntRange(1, 3).Draw(t, "changes") {
				at := rapid.IntRange(0, len(data)-1).Draw(t, "at")
				b := rapid.OneOf(rapid.Byte(), rapid.SampledFrom([]byte{0, 1, 2, 3, 0x7f, 0x80, 0xff})).Draw(t, "byte")
				switch rapid.IntRange(0, 2).Draw(t, "change") {
				case 0:
					data[at] = b
				case 1:
					data = slices.Insert(data, at, b)
				case 2:
					if len(data) > 1 {
						data = slices.Delete(data, at, at+1)
					}
				}
			}
			checkDecode(t, f, data)
		})
	})
}

// Contents that no planner makes but the form can express keep their bytes too.
func TestUnsortedAndRepeatedEntriesKeepTheirBytes(t *testing.T) {
	odd := sampleLayout
	odd.Tensors = slices.Concat(odd.Tensors, odd.Tensors[:1])
	slices.Reverse(odd.Tensors)
	odd.Values = slices.Concat(odd.Values, odd.Values)
	m := sampleManifest
	m.Layout = odd
	m.Ranks = slices.Concat(m.Ranks[1:], m.Ranks)
	local := sampleLocal
	local.Items = slices.Concat(local.Items, local.Items)
	for i, data := range [][]byte{checkpoint.EncodeLocal(local), checkpoint.EncodeLayout(odd), checkpoint.EncodeManifest(m)} {
		if got, err := forms[i].again(data); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %x came back as %x, %v", forms[i].name, data, got, err)
		}
	}
}

func TestTruncatedFormIsRefused(t *testing.T) {
	eachForm(t, func(t *testing.T, f form) {
		for n := range f.sample {
			if _, err := f.again(f.sample[:n]); err == nil {
				t.Errorf("the first %d of %d bytes were accepted", n, len(f.sample))
			}
			checkDecode(t, f, f.sample[:n])
		}
		_, err := f.again(append(slices.Clone(f.sample), 0))
		wantError(t, err, "1 bytes after the end")
	})
}

func TestFutureVersionAsksForAnUpgrade(t *testing.T) {
	eachForm(t, func(t *testing.T, f form) {
		data := slices.Clone(f.sample)
		data[4] = 2
		_, err := f.again(data)
		wantError(t, err, "version 2 of "+f.magic, "upgrade")
	})
	data := slices.Clone(forms[2].sample)
	data[bytes.Index(data, []byte("CKLY"))+4] = 9
	_, err := checkpoint.DecodeManifest(data)
	wantError(t, err, "version 9 of CKLY", "upgrade")
}

func TestOtherFormIsRefused(t *testing.T) {
	eachForm(t, func(t *testing.T, f form) {
		for _, other := range forms {
			if other.name != f.name {
				_, err := f.again(other.sample)
				wantError(t, err, "decode "+f.name, "offset 0", "not a "+f.magic)
			}
		}
	})
}

func TestDigest(t *testing.T) {
	d := checkpoint.Sum([]byte("abc"))
	const want = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
	if d.String() != want {
		t.Errorf("digest %s, want %s", d, want)
	}
	text, err := d.MarshalText()
	var back checkpoint.Digest
	if err != nil || back.UnmarshalText(text) != nil || back != d {
		t.Errorf("%s came back as %s, %v", text, back, err)
	}
	for _, bad := range []string{"", want[1:], want + "00", strings.Repeat("x", 64)} {
		_, err := checkpoint.ParseDigest(bad)
		wantError(t, err, "digest")
	}
}

func TestItemsAndBytesOfALayout(t *testing.T) {
	var sum int64
	seen := checkpoint.Local{}
	for rank := range 3 {
		for _, it := range sampleLayout.Items(rank) {
			sum += it.Bytes
			seen.Items = append(seen.Items, it)
		}
	}
	if got := sampleLayout.Bytes(); got != sum || sum != 32+32+8+100+8+1+2 {
		t.Errorf("the layout has %d bytes, its items %d", got, sum)
	}
	// The items that a rank has to write are themselves a plan that can be encoded.
	if _, err := checkpoint.DecodeLocal(checkpoint.EncodeLocal(seen)); err != nil {
		t.Error(err)
	}
	want := []checkpoint.Item{
		{Shard: tensor.Shard{FQN: "layers.0.weight", DType: tensor.Float32, Global: tensor.Shape{4, 4}, Box: box([]int64{2, 0}, []int64{2, 4})}, Bytes: 32},
		{Value: true, Shard: tensor.Shard{FQN: "optim.lr.0"}, Bytes: 8},
		{Value: true, Shard: tensor.Shard{FQN: "rng"}, Bytes: 2, PerRank: true},
	}
	if got := sampleLayout.Items(1); !reflect.DeepEqual(got, want) {
		t.Errorf("rank 1 writes %+v, want %+v", got, want)
	}
	if got := sampleLayout.Items(7); got != nil {
		t.Errorf("rank 7 writes %+v", got)
	}
	shares := sampleLayout.Shares()
	for rank := range 8 {
		if got, want := shares.Items(rank), sampleLayout.Items(rank); !reflect.DeepEqual(got, want) {
			t.Errorf("rank %d has the share %+v, want %+v", rank, got, want)
		}
	}
}

// The key 0 and the key "0" of a mapping have one name, and are not the same.
func TestLiteralsOfAPath(t *testing.T) {
	const fqn = "optimizer.state.0.step"
	item := func(key checkpoint.PathElement) checkpoint.Local {
		return checkpoint.Local{Items: []checkpoint.Item{{Value: true, Shard: tensor.Shard{FQN: fqn}, Bytes: 1, Path: checkpoint.Path{checkpoint.PathKey("optimizer"), checkpoint.PathKey("state"), key, checkpoint.PathKey("step")}}}}
	}
	seen := map[string]bool{}
	for _, key := range []checkpoint.PathElement{checkpoint.PathKey("0"), checkpoint.PathIndex(0), checkpoint.PathLiteral("0")} {
		data := checkpoint.EncodeLocal(item(key))
		back, err := checkpoint.DecodeLocal(data)
		if err != nil || back.Items[0].Path[2] != key {
			t.Errorf("%+v is read back as %+v, %v", key, back.Items, err)
		}
		seen[string(data)] = true
	}
	if len(seen) != 3 {
		t.Errorf("a key, an index and a literal are written in %d ways", len(seen))
	}
	if p := (checkpoint.Path{checkpoint.PathLiteral("0")}); p.Plain("0") || p.Validate("0") != nil || p.String() != "[{0}]" {
		t.Errorf("%v: plain %v, %v", p, p.Plain("0"), p.Validate("0"))
	}
	if err := (checkpoint.Path{checkpoint.PathKey("a"), {Literal: true}}).Validate("a."); err == nil {
		t.Error("a literal has no text")
	}
}
