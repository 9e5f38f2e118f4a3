package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/tensor"
)

// FuzzIndex decodes anything, with a checksum that is right so that the rest
// is reached. What decodes must encode to the same.
func FuzzIndex(f *testing.F) {
	data := sample(f).Encode()
	f.Add(data[:len(data)-4])
	from := sampleFrom(f).Encode()
	f.Add(from[:len(from)-4])
	f.Add([]byte("CKIX\x01\x03\x00\x00"))
	f.Add([]byte("CKIX\x01\x03\xff\xff\xff\xff\x0f"))
	f.Add([]byte("CKIX\x01\x00\x01\x02..\x05\x00"))
	f.Fuzz(func(t *testing.T, body []byte) {
		data := binary.LittleEndian.AppendUint32(slices.Clone(body), crc32c.Checksum(body))
		x, err := DecodeIndex(data)
		if err != nil {
			return
		}
		again, err := DecodeIndex(x.Encode())
		if err != nil || !reflect.DeepEqual(x, again) {
			t.Errorf("decoded %+v, then %+v, %v", x, again, err)
		}
	})
}

// TestIndexDamage flips every bit, and cuts at every byte.
func TestIndexDamage(t *testing.T) {
	data := sample(t).Encode()
	for at := range data {
		for bit := range 8 {
			broken := slices.Clone(data)
			broken[at] ^= 1 << bit
			if _, err := DecodeIndex(broken); err == nil {
				t.Errorf("a flip of bit %d at %d is not noticed", bit, at)
			}
		}
		if _, err := DecodeIndex(data[:at]); err == nil {
			t.Errorf("cut at %d: not noticed", at)
		}
	}
}

// TestReceiptOfLaterVersion reads a receipt with a member that this version
// does not know, and notices damage in that member.
func TestReceiptOfLaterVersion(t *testing.T) {
	r := Receipt{Store: "s", Run: "r", Trial: "t", Checkpoint: "c", Manifest: Sum(nil)}
	data, err := EncodeReceipt(r)
	if err != nil {
		t.Fatal(err)
	}
	body := bytes.Replace(data[:bytes.LastIndex(data, []byte(sumMember))], []byte(`"step"`), []byte(`"later": [1, 2], "step"`), 1)
	later := fmt.Appendf(slices.Clone(body), "%s%08x%s", sumMember, crc32c.Checksum(body), sumEnd)
	if got, err := DecodeReceipt(later); err != nil || !got.Same(r) {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := DecodeReceipt(bytes.Replace(later, []byte("[1, 2]"), []byte("[1, 3]"), 1)); err == nil {
		t.Error("damage is not noticed")
	}
}

// sample is an index with digests and sums.
func sample(testing.TB) Index {
	part := tensor.Box{Offsets: []int64{0, 1}, Sizes: []int64{300, 100}}
	shard := func(fqn string, dtype tensor.DType, shape tensor.Shape, box tensor.Box) Item {
		s := tensor.Shard{FQN: fqn, DType: dtype, Global: shape, Box: box}
		return Item{Shard: s, Bytes: s.Bytes()}
	}
	x := Index{Rank: 3, Files: []File{{Name: "r00003.safetensors", Size: 124113}}, Entries: []Entry{
		{Item: shard("layers.0.weight", tensor.Float32, tensor.Shape{300, 200}, part), Key: "layers.0.weight@0,1", Offset: 4104},
		{Item: shard("scale", tensor.Float64, nil, tensor.Box{}), Key: "scale", Offset: 4096},
		{Item: shard("empty", tensor.Complex32, tensor.Shape{0}, tensor.Shape{0}.Full()), Key: "empty", Offset: 124104},
		{Item: Item{Value: true, Shard: tensor.Shard{FQN: "rng"}, Bytes: 9, PerRank: true}, Key: "rng", Offset: 124104},
	}}
	for i := range x.Entries {
		e := &x.Entries[i]
		e.Digest = Sum([]byte(e.Key))
		for b := range Blocks(e.Item.Bytes) {
			e.Sums = append(e.Sums, uint32(i)<<16+uint32(b))
		}
	}
	return x
}

// TestIndexGolden holds the bytes of version 1 for ever.
func TestIndexGolden(t *testing.T) {
	golden, err := os.ReadFile("testdata/index.v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	x := sample(t)
	got := x.Encode()
	if text := hex.Dump(got); text != string(golden) {
		t.Errorf("encoding differs; got:\n%s", text)
	}
	back, err := DecodeIndex(got)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(back.Encode(), got) || len(back.Entries) != len(x.Entries) {
		t.Errorf("decoded %+v", back)
	}
}

// sampleFrom is an index with a file of another checkpoint.
func sampleFrom(t testing.TB) Index {
	x := sample(t)
	x.Files = append(x.Files, File{Name: "r00001.safetensors", Size: 8192, From: Ref{Run: "base", Trial: "t0", Checkpoint: "step-100.a1"}})
	x.Entries[1].File = 1
	return x
}

// TestIndexFromGolden holds the bytes of version 4 for ever. Without a file of another
// checkpoint an index has version 1.
func TestIndexFromGolden(t *testing.T) {
	golden, err := os.ReadFile("testdata/index.v4.hex")
	if err != nil {
		t.Fatal(err)
	}
	x := sampleFrom(t)
	got := x.Encode()
	if text := hex.Dump(got); text != string(golden) {
		t.Errorf("encoding differs; got:\n%s", text)
	}
	back, err := DecodeIndex(got)
	if err != nil || !bytes.Equal(back.Encode(), got) || back.Files[1] != x.Files[1] {
		t.Errorf("decoded %+v, %v", back.Files, err)
	}
	x.Files[1].From = Ref{}
	if v := x.Encode()[len(indexMagic)]; v != indexVersion {
		t.Errorf("an index of own files has version %d", v)
	}
}

// TestIndexFromIsValidated refuses files of other checkpoints that none can have written, or
// that lead elsewhere.
func TestIndexFromIsValidated(t *testing.T) {
	for name, change := range map[string]func(*Index){
		"the first file":  func(x *Index) { x.Files[0].From = x.Files[1].From },
		"an index":        func(x *Index) { x.Files[1].Name = "r00001.idx" },
		"a receipt":       func(x *Index) { x.Files[1].Name = ReceiptFile },
		"a partial file":  func(x *Index) { x.Files[1].Name = "r00001.safetensors.1.tmp" },
		"a path":          func(x *Index) { x.Files[1].Name = "../r00001.safetensors" },
		"no run":          func(x *Index) { x.Files[1].From.Run = "" },
		"out of the root": func(x *Index) { x.Files[1].From.Run = ".." },
		"in place":        func(x *Index) { x.Files[1].From.Trial = "." },
		"four parts":      func(x *Index) { x.Files[1].From.Checkpoint = "a/b" },
		"a NUL":           func(x *Index) { x.Files[1].From.Checkpoint = "a\x00" },
		"a long name":     func(x *Index) { x.Files[1].From.Checkpoint = strings.Repeat("a", 256) },
	} {
		x := sampleFrom(t)
		change(&x)
		if got, err := DecodeIndex(x.Encode()); err == nil {
			t.Errorf("%s: decoded as %+v", name, got.Files)
		}
	}
	x := sample(t)
	data := x.Encode()
	data[len(indexMagic)] = fromVersion
	at := bytes.Index(data, []byte(x.Files[0].Name)) + len(x.Files[0].Name) + 3 // a size of three bytes
	data = slices.Insert(data[:len(data)-4], at, 0)
	data = binary.LittleEndian.AppendUint32(data, crc32c.Checksum(data))
	if _, err := DecodeIndex(data); err == nil || !strings.Contains(err.Error(), "no file") {
		t.Errorf("version 4 without a file of another checkpoint: %v", err)
	}
}

// TestReceiptGolden holds the bytes of receipts for ever: those of this version, and of earlier
// ones, which had no sizes.
func TestReceiptGolden(t *testing.T) {
	read := func(name string) (r Receipt) {
		t.Helper()
		golden, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if r, err = DecodeReceipt(golden); err != nil {
			t.Fatal(err)
		}
		got, err := EncodeReceipt(r)
		if err != nil || !bytes.Equal(got, golden) {
			t.Errorf("%s is encoded as\n%s, %v", name, got, err)
		}
		return r
	}
	now, before := read("COMMIT.json"), read("COMMIT-without-size.json")
	if now.WorldSize != 2 || now.Bytes == 0 || before.WorldSize != 0 || !now.Same(before) || !before.Same(now) {
		t.Errorf("%+v is not the same as %+v", now, before)
	}
	other := now
	if other.Bytes++; other.Same(now) || !other.Same(before) {
		t.Error("another size is the same, or differs from none")
	}
}
