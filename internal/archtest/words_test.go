package archtest

import (
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

// TestWords: comments, logs, errors, help texts and pages contain none of Words.
func TestWords(t *testing.T) {
	hits, err := FindWords(os.DirFS(root(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, hit := range hits {
		t.Error(hit)
	}
}

// TestWordsAreFound: each sort of file is read, in Go without identifiers.
func TestWordsAreFound(t *testing.T) {
	tree := fstest.MapFS{
		"room/a.go":                   {Data: []byte("// Package room says\n// it aloud, once\n// more.\npackage room\n\nvar says = \"nobody\" + `x\nbeside`\n")},
		"room/testdata/golden.txt":    {Data: []byte("whoever\n")},
		"cmd/testdata/script/x.txtar": {Data: []byte("# it goes on\n")},
		"docs/page.md":                {Data: []byte("Anew.\n")},
		"python/p.py":                 {Data: []byte("x = 1  # once more\n")},
		".ci/run":                     {Data: []byte("# all the same\n")},
		".git/x.md":                   {Data: []byte("anew\n")},
		"internal/archtest/words.go":  {Data: []byte("package archtest // prey\n")},
	}
	hits, err := FindWords(tree)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, h := range hits {
		got = append(got, strings.SplitN(h.String(), ": write", 2)[0])
	}
	want := []string{
		`.ci/run:1: "all the same"`, `cmd/testdata/script/x.txtar:1: "goes on"`, `docs/page.md:1: "Anew"`, `python/p.py:1: "once more"`,
		`room/a.go:6: "nobody"`, `room/a.go:7: "beside"`, `room/a.go:1: "says"`, `room/a.go:2: "aloud"`, `room/a.go:2: "once\n// more"`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("found\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
