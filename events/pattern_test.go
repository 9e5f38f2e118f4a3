package events

import (
	"strings"
	"testing"
)

func TestPattern(t *testing.T) {
	for text, want := range map[string]string{
		"checkpoint.committed": "checkpoint.committed",
		"gpu.*":                "gpu.recovered gpu.unhealthy",
		"*.failed":             "restore.failed write.failed",
		"report.*":             "report.metrics",
	} {
		p, err := ParsePattern(text)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, k := range p.Kinds() {
			got = append(got, string(k))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s names %q, want %q", text, got, want)
		}
	}
	if p, err := ParsePattern("*.*"); err != nil || len(p.Kinds()) != len(kinds) {
		t.Errorf("*.* names %d of %d kinds: %v", len(p.Kinds()), len(kinds), err)
	}
	for _, bad := range []string{"", "*", "checkpoint", "checkpoint.", "check*.*", "checkpoint.committed.v1", "checkpoint.>"} {
		if _, err := ParsePattern(bad); err == nil || !strings.Contains(err.Error(), "families are access, audit, checkpoint, gpu") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if got := Pattern("gpu.*").Subjects("a.b", None); got != "ckpt.a%2Eb.*.*.gpu.*" {
		t.Error(got)
	}
	if got := Pattern("gpu.*").Subjects("a", "t.1"); got != "ckpt.a.t%2E1.*.gpu.*" {
		t.Errorf("subjects of a trial: %q", got)
	}
	if got := Pattern("*.failed").Subjects(None, None); got != "ckpt.*.*.*.*.failed" {
		t.Error(got)
	}
}
