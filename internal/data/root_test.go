package data_test

import (
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"pgregory.net/rapid"
)

func TestRefOf(t *testing.T) {
	for _, c := range []struct{ run, id, want string }{
		{"bert", "step-320.a4", "bert/main/step-320.a4"},
		{"..", ".hidden.a1", "%2E./main/%2Ehidden.a1"},
		{"a/b", "50% done.a1", "a%2Fb/main/50%25%20done.a1"},
		{"é", "x\n.a1", "%C3%A9/main/x%0A.a1"},
	} {
		if got := checkpoint.RefOf(c.run, "main", c.id).String(); got != c.want {
			t.Errorf("run %q, checkpoint %q lie in %q, want %q", c.run, c.id, got, c.want)
		}
	}
}

// Any names that the log takes are safe as those of directories, and no two
// checkpoints share one.
func TestRefOfAnyName(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.Map(rapid.SliceOfN(rapid.Byte(), 1, 80), func(b []byte) string { return string(b) })
		a := [3]string{name.Draw(t, "run"), name.Draw(t, "trial"), name.Draw(t, "checkpoint")}
		b := [3]string{name.Draw(t, "other run"), name.Draw(t, "other trial"), name.Draw(t, "other checkpoint")}
		ref, other := checkpoint.RefOf(a[0], a[1], a[2]), checkpoint.RefOf(b[0], b[1], b[2])
		if err := ref.Validate(); err != nil {
			t.Fatal(err)
		}
		if (ref == other) != (a == b) {
			t.Fatalf("%q lies in %q, %q in %q", a, ref, b, other)
		}
	})
}
