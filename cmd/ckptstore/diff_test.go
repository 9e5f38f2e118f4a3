package main

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/ckptstore/ckptstore/internal/insight"
	"github.com/ckptstore/ckptstore/projections"
)

func TestDiffOfConfigurations(t *testing.T) {
	var a, b map[string]any
	for text, into := range map[string]*map[string]any{
		`{"opt":{"lr":0.1,"betas":[0.9,0.99],"none":{}},"same":1,"gone":null,"kind":{"x":1}}`: &a,
		`{"opt":{"lr":0.2,"betas":[0.9,0.98],"none":{}},"same":1,"a.b":{"":2},"kind":"x"}`:    &b,
	} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatal(err)
		}
	}
	d, err := insight.CompareTrials(insight.TrialRows{Trial: projections.Trial{Config: a}}, insight.TrialRows{Trial: projections.Trial{Config: b}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, one := range d.Differences {
		got = append(got, one.Name+" "+one.Changes[0]+": "+configText(one, insight.Added, one.A)+" → "+configText(one, insight.Removed, one.B))
	}
	want := []string{
		`"a.b"."" added:  → 2`, `gone removed: null → `, `kind added:  → "x"`, `kind.x removed: 1 → `,
		`opt.betas changed: [0.9,0.99] → [0.9,0.98]`, `opt.lr changed: 0.1 → 0.2`,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("differences %q, want %q", got, want)
	}
}
