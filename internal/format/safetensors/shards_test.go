package safetensors

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

func TestIndexRoundTrip(t *testing.T) {
	x := Index{TotalSize: 24, Files: map[string]string{"w": ShardFile(1, 2), `"ä/`: ShardFile(2, 2), "v": ShardFile(1, 2)}}
	text, err := EncodeIndex(x)
	if err != nil {
		t.Fatal(err)
	}
	back, err := ParseIndex(text)
	if err != nil || back.TotalSize != x.TotalSize || !maps.Equal(back.Files, x.Files) {
		t.Errorf("parsed %+v, %v", back, err)
	}
	want := []string{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
	if got := back.Shards(); !slices.Equal(got, want) {
		t.Errorf("shards %v", got)
	}
	if _, err := EncodeIndex(Index{Files: map[string]string{"\xff": "a.safetensors"}}); err == nil {
		t.Error("a name in broken UTF-8 is encoded")
	}
}

func TestParseIndex(t *testing.T) {
	for text, want := range map[string]string{
		`{"metadata": {"total_size": 2.4e1, "extra": [1, {"a": null}]}, "more": {"x": []}, "weight_map": {"w": "m.safetensors"}}`: "",
		`{"weight_map": {}}`: "",
		``:                   "unexpected EOF",
		`{}`:                 "no weight_map",
		`[]`:                 "got [",
		`{"weight_map": {"w": "../m.safetensors"}}`:                      "not the plain name",
		`{"weight_map": {"w": "/m.safetensors"}}`:                        "not the plain name",
		`{"weight_map": {"w": "m.bin"}}`:                                 "not the plain name",
		`{"weight_map": {"w": ".safetensors"}}`:                          "not the plain name",
		`{"weight_map": {"w": 3}}`:                                       "want a string",
		`{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}`:   `key "w" occurs twice`,
		`{"metadata": {"total_size": -1}, "weight_map": {}}`:             "not a number of bytes",
		`{"metadata": {"total_size": "1"}, "weight_map": {}}`:            "want a number",
		`{"weight_map": {}} {}`:                                          "want nothing",
		`{"weight_map": {`:                                               "unexpected",
		"{\"weight_map\": {\"\xff\": \"a.safetensors\"}}":                "UTF-8",
		`{"more": ` + strings.Repeat("[", 20000) + `, "weight_map": {}}`: "",
	} {
		_, err := ParseIndex([]byte(text))
		switch {
		case want == "" && err != nil && !strings.Contains(text, "[[["):
			t.Errorf("%.80s: %v", text, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%.80s: %v, want %q", text, err, want)
		}
	}
}

func FuzzParseIndex(f *testing.F) {
	f.Add([]byte(`{"metadata": {"total_size": 24}, "weight_map": {"w": "m.safetensors"}}`))
	f.Add([]byte(`{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}, "x": [[]]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		x, err := ParseIndex(text)
		if err != nil {
			return
		}
		again, err := EncodeIndex(x)
		if err != nil {
			t.Fatal(err)
		}
		back, err := ParseIndex(again)
		if err != nil || back.TotalSize != x.TotalSize || !maps.Equal(back.Files, x.Files) {
			t.Errorf("parsed %+v, then %+v, %v", x, back, err)
		}
	})
}
