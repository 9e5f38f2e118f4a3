package archtest

import (
	"os"
	"testing"
)

func TestWords(t *testing.T) {
	hits, err := FindWords(os.DirFS(root(t)))
	if err != nil {
		t.Fatal(err)
	}
	for _, hit := range hits {
		t.Error(hit)
	}
}
