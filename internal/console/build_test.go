package console

import "testing"

func TestDescribed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ version, commit, date, want string }{
		{"0.1.0", "f758cde0cafe", "2026-11-27T00:10:00Z", "0.1.0 (commit f758cde0cafe, 2026-11-27T00:10:00Z)"},
		{"0.1.0", "f758cde0cafe", "", "0.1.0 (commit f758cde0cafe)"},
		{"0.1.0", "", "2026-11-27T00:10:00Z", "0.1.0"},
		{"(unreleased)", "", "", "(unreleased)"},
	} {
		if got := described(c.version, c.commit, c.date); got != c.want {
			t.Errorf("%q, %q, %q: %q, want %q", c.version, c.commit, c.date, got, c.want)
		}
	}
}

func TestRelease(t *testing.T) {
	t.Parallel()
	if got := Release("(unreleased)"); got != "(unreleased)" {
		t.Errorf("the release of a test is %q", got)
	}
	if Module() == "" {
		t.Error("no version of the main module")
	}
}
