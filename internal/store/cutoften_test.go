package store

import "testing"

func TestCuttingByEnv(t *testing.T) {
	t.Setenv(envCut, "")
	if c, err := cuttingByEnv(defaultCutting); err != nil || c != defaultCutting {
		t.Errorf("%+v, %v", c, err)
	}
	t.Setenv(envCut, "512")
	if c, err := cuttingByEnv(defaultCutting); err != nil || c.events != 512 || c.limits.Messages != 64 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, wrong := range []string{"x", "15", "-1", "512 "} {
		t.Setenv(envCut, wrong)
		if _, err := cuttingByEnv(defaultCutting); err == nil {
			t.Errorf("%q is taken", wrong)
		}
	}
}
