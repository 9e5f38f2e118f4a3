package events

import (
	"fmt"
	"slices"
	"strings"
)

// Pattern names kinds of events: one kind ("checkpoint.committed"), a family
// ("checkpoint.*"), or a word of any family ("*.failed").
type Pattern string

// ParsePattern reports a pattern that no kind of this version, and no [Void], matches.
func ParsePattern(text string) (Pattern, error) {
	p := Pattern(text)
	if len(p.Kinds()) == 0 && !p.Match(Void{}.Kind()) {
		return "", fmt.Errorf("no such type %q; it is FAMILY.KIND, such as checkpoint.committed, or FAMILY.*: families are %s",
			text, strings.Join(families(), ", "))
	}
	return p, nil
}

// Match reports whether the pattern names this kind.
func (p Pattern) Match(k Kind) bool {
	family, word, ok := strings.Cut(string(p), ".")
	kindFamily, kindWord, _ := strings.Cut(string(k), ".")
	return ok && (family == "*" || family == kindFamily) && (word == "*" || word == kindWord)
}

// Kinds are the kinds of this version that the pattern names, sorted.
func (p Pattern) Kinds() []Kind {
	var found []Kind
	for k := range kinds {
		if p.Match(k) {
			found = append(found, k)
		}
	}
	slices.Sort(found)
	return found
}

// Subjects is the filter, in the server's own language, of the events of a
// run that the pattern names; [None] is any run.
func (p Pattern) Subjects(run string) string {
	name := "*"
	if run != None {
		name = EncodeName(run)
	}
	return Prefix + "." + name + ".*.*." + string(p)
}

func families() []string {
	var found []string
	for k := range kinds {
		found = append(found, k.Family())
	}
	slices.Sort(found)
	return slices.Compact(found)
}
