package retention

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Policy{
		"last=2":               {Last: 2},
		" last=1 , every=500 ": {Last: 1, Every: 500},
		"every=1000steps":      {Every: 1000},
		"best=3:loss:min":      {Best: []Best{{N: 3, Metric: "loss"}}},
		"best=1:val:acc=top1:max,best=1:val:acc=top1:min": {Best: []Best{{N: 1, Metric: "val:acc=top1", Greatest: true}, {N: 1, Metric: "val:acc=top1"}}},
		"best=1:a%2Cb%25:max":                             {Best: []Best{{N: 1, Metric: "a,b%", Greatest: true}}},
		"keep-tagged":                                     {KeepTagged: true},
		"superseded=keep":                                 {},
		"superseded=delete,last=1":                        {Last: 1, Superseded: DeleteSuperseded},
		"last=2,best=1:loss:min,every=1000":               {Last: 2, Every: 1000, Best: []Best{{N: 1, Metric: "loss"}}},
	} {
		got, err := Parse(text)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q is %+v, %v; want %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                                "want last=N",
		"last":                            "last=2",
		"last=0":                          "1 or more",
		"last=-1":                         "1 or more",
		"last=99999999999999999999":       "1 or more",
		"last=2,":                         `item ""`,
		"last=2,last=3":                   "another of its kind",
		"every=1h":                        "every=1000steps",
		"best=1":                          "best=1:loss:min",
		"best=1:loss":                     "best=1:loss:min",
		"best=1:loss:least":               "best=1:loss:min",
		"best=1::min":                     "best=1:loss:min",
		"best=x:loss:min":                 "1 or more",
		"best=1:50%:min":                  "%25",
		"best=1:5%zz:min":                 "%25",
		"best=1:loss:min,best=2:loss:min": "another of its kind",
		"keep-tagged=yes":                 "keep-tagged",
		"superseded":                      "superseded=delete",
		"superseded=drop":                 "superseded=delete",
		"keep=3":                          `item "keep=3"`,
	} {
		_, err := Parse(text)
		if !errors.Is(err, ErrPolicy) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q in it", text, err, want)
		}
	}
}

func policies(t *rapid.T) Policy {
	p := Policy{
		Last: rapid.IntRange(0, 5).Draw(t, "last"), Every: rapid.Int64Range(0, 20).Draw(t, "every"),
		KeepTagged: rapid.Bool().Draw(t, "keep-tagged"),
		Superseded: rapid.SampledFrom([]Superseded{KeepSuperseded, DeleteSuperseded}).Draw(t, "superseded"),
	}
	metrics := rapid.OneOf(rapid.SampledFrom([]string{"loss", "acc"}), rapid.StringN(1, 8, -1))
	for _, name := range rapid.SliceOfNDistinct(metrics, 0, 2, rapid.ID).Draw(t, "metrics") {
		p.Best = append(p.Best, Best{N: rapid.IntRange(1, 4).Draw(t, "n"), Metric: name, Greatest: rapid.Bool().Draw(t, "greatest")})
	}
	return p
}

// TestPolicyInverse: a policy is read back from its text as it was.
func TestPolicyInverse(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := policies(t)
		got, err := Parse(p.String())
		if err != nil || !reflect.DeepEqual(got, p) {
			t.Fatalf("%+v is written %q, which is %+v, %v", p, p, got, err)
		}
	})
}

// FuzzParse: what is taken is written in one way.
func FuzzParse(f *testing.F) {
	for _, text := range []string{"last=2,best=1:loss:min", "every=10steps,keep-tagged", "best=2:a%2C%:max", "superseded=delete"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(p.String())
		if err != nil || !reflect.DeepEqual(again, p) {
			t.Fatalf("%q is written %q, which is %+v, %v", text, p, again, err)
		}
	})
}
