package main

import (
	"cmp"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A component is an entry of a CycloneDX bill of materials.
type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	PURL       string     `json:"purl,omitempty"`
	Licenses   []any      `json:"licenses,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

// A property is a fact about a component for which CycloneDX has no member.
type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// A lock is the part of npm's lock file that bill reads.
type lock struct {
	Packages map[string]struct {
		Version   string `json:"version"`
		Integrity string `json:"integrity"`
		Dev       bool   `json:"dev"`
	} `json:"packages"`
}

// bill writes the bill of materials, CycloneDX 1.6: the Go modules that the programs
// record, the standard library, the C library of the image, and the packages of the page.
func (r *release) bill(context.Context) error {
	found := map[string]component{}
	for _, arch := range r.arches {
		for _, name := range names {
			info, err := buildinfo.ReadFile(filepath.Join(r.bin(arch), name))
			if err != nil {
				return err
			}
			add := func(path, version, sum string) {
				c := component{Type: "library", Name: path, Version: version, PURL: "pkg:golang/" + path + "@" + version}
				if c.Ref = c.PURL; sum != "" {
					c.Properties = []property{{"go.sum", sum}}
				}
				found[c.Ref] = c
			}
			add("stdlib", strings.TrimPrefix(info.GoVersion, "go"), "")
			for _, m := range info.Deps {
				if m.Replace != nil {
					m = m.Replace
				}
				add(m.Path, m.Version, m.Sum)
			}
		}
	}
	for _, arch := range r.arches {
		b := r.glibc[arch]
		c := component{Type: "library", Name: "libc6", Version: b.version, Properties: []property{{"sha256", b.digest}}}
		c.PURL = "pkg:deb/debian/libc6@" + strings.ReplaceAll(b.version, "+", "%2B") + "?arch=" + arch
		c.Ref = c.PURL
		found[c.Ref] = c
	}
	if err := r.pageParts(found); err != nil {
		return err
	}
	of := component{
		Type: "application", Name: "ckptstore", Version: r.version, Ref: "pkg:pypi/ckptstore@" + r.version, PURL: "pkg:pypi/ckptstore@" + r.version,
		Licenses:   []any{map[string]any{"license": map[string]string{"id": "Apache-2.0"}}},
		Properties: []property{{"commit", r.commit}},
	}
	text, err := json.MarshalIndent(map[string]any{
		"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
		"metadata":   map[string]any{"timestamp": r.date.Format(time.RFC3339), "component": of},
		"components": slices.SortedFunc(maps.Values(found), func(a, b component) int { return cmp.Compare(a.Ref, b.Ref) }),
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "ckptstore-"+r.version+".cdx.json"), append(text, '\n'), 0o644)
}

// pageParts adds the packages of npm from which the page was built. Its bundle may have
// code of any of them.
func (r *release) pageParts(found map[string]component) error {
	text, err := os.ReadFile(filepath.Join(r.root, "internal", "page", "package-lock.json"))
	if err != nil {
		return err
	}
	var parts lock
	if err := json.Unmarshal(text, &parts); err != nil {
		return fmt.Errorf("internal/page/package-lock.json: %w", err)
	}
	for path, p := range parts.Packages {
		at := strings.LastIndex(path, "node_modules/")
		if at < 0 {
			continue // the page itself
		}
		name := path[at+len("node_modules/"):]
		c := component{Type: "library", Name: name, Version: p.Version, PURL: "pkg:npm/" + strings.Replace(name, "@", "%40", 1) + "@" + p.Version}
		c.Ref, c.Properties = c.PURL, []property{{"npm.integrity", p.Integrity}}
		if p.Dev {
			c.Properties = append(c.Properties, property{"npm.dev", "true"})
		}
		found[c.Ref] = c
	}
	return nil
}
