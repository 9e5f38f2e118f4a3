package archtest

import (
	"fmt"
	"strings"
)

// Table renders the rooms of the law as a Markdown table: path, duty, and which
// rooms each may import. ARCHITECTURE.md holds it.
func (l Law) Table() string {
	var b strings.Builder
	b.WriteString("| room | holds | may import |\n|---|---|---|\n")
	for _, r := range l.Rooms {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", r.Path, r.Holds, r.imports())
	}
	return b.String()
}

func (r Room) imports() string {
	list := make([]string, len(r.May))
	for i, path := range r.May {
		if path == Any {
			return "every room"
		}
		list[i] = "`" + path + "`"
	}
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}
