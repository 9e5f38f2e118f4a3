package cmd_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// tensors is a safetensors file of 2 MiB tensors, each of one byte value.
func tensors(t *testing.T, path string, values ...byte) {
	t.Helper()
	const size = 2 << 20
	var data []byte
	table := map[string]any{}
	for i, v := range values {
		table["w"+string(rune('0'+i))] = map[string]any{"dtype": "U8", "shape": []int{size}, "data_offsets": []int{len(data), len(data) + size}}
		data = append(data, bytes.Repeat([]byte{v}, size)...)
	}
	header, err := json.Marshal(table)
	if err == nil {
		err = os.WriteFile(path, append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), data...), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestVerifyRepairJSON damages a file, repairs it from another run, and records the output
// of verify --json before, during and after the repair.
func TestVerifyRepairJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := "--store=" + filepath.Join(dir, "store")
	for i, run := range []string{"a", "b"} {
		file := filepath.Join(dir, run+".safetensors")
		tensors(t, file, 7, byte(8+i))
		output(t, 0, "ckptstore", "import", file, "--run", run, "--step", "1", "-q", store)
	}
	hurt := func(at ...int64) {
		f, err := os.OpenFile(filepath.Join(dir, "store", "data", "a", "main", "step-1.a1", "r00000.safetensors"), os.O_RDWR, 0)
		for _, at := range at {
			if err == nil {
				_, err = f.WriteAt([]byte{0xee}, at)
			}
		}
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	type result struct {
		Findings []struct{ FQN string }
		Repaired []struct{ Chunks []struct{ FQN, From string } }
		Left     []struct{ FQN, Reason string } `json:"unrepaired"`
	}
	hurt(4096 + 70000) // w0, whose bytes b has
	output(t, 0, "ckptstore", "verify", "a", "--quick", store)
	output(t, 6, "ckptstore", "verify", "a", store)
	output(t, 6, "ckptstore", "verify", "a", "--deep", store)
	text := output(t, 0, "ckptstore", "verify", "--repair", "--json", store)
	schema(t, "verify-repaired", text)
	var got result
	if decode(t, text, &got); len(got.Repaired) != 1 || got.Repaired[0].Chunks[0].FQN != "w0" || !strings.Contains(got.Repaired[0].Chunks[0].From, "/b/main/") || len(got.Left)+len(got.Findings) > 0 {
		t.Errorf("repaired: %s", text)
	}
	output(t, 0, "ckptstore", "verify", "--deep", store)

	hurt(4096+1, 4096+2<<20) // and w1, which has no other copy
	text = output(t, 6, "ckptstore", "verify", "a", "--repair", "--json", store)
	schema(t, "verify-unrepaired", text)
	got = result{}
	if decode(t, text, &got); len(got.Repaired) != 1 || len(got.Left) != 1 || got.Left[0].FQN != "w1" || len(got.Findings) != 1 || got.Findings[0].FQN != "w1" {
		t.Errorf("unrepaired: %s", text)
	}
	if !strings.Contains(got.Left[0].Reason, "resume from another checkpoint") {
		t.Errorf("reason %q", got.Left[0].Reason)
	}
}
