package s3

import (
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// TestProbe probes servers that each lack one thing.
func TestProbe(t *testing.T) {
	drop := func(name string) func(string, int, *http.Request) *fault {
		return func(_ string, _ int, r *http.Request) *fault {
			r.Header.Del(name)
			return nil
		}
	}
	rule := func(rule string) func(string, int, *http.Request) *fault {
		return func(kind string, _ int, _ *http.Request) *fault {
			if kind != "GET lifecycle" {
				return nil
			}
			return &fault{status: 200, body: "<LifecycleConfiguration><Rule><ID>r</ID><Status>Enabled</Status>" + rule + "</Rule></LifecycleConfiguration>"}
		}
	}
	for _, c := range []struct {
		name   string
		fault  func(string, int, *http.Request) *fault
		fails  string
		warns  string
		silent string // not among the warnings
	}{
		{"all", nil, "", "lifecycle rules cannot be read", ""},
		{"no exclusive PUT and Complete", drop("If-None-Match"), "lacks exclusive PUT (If-None-Match: *), exclusive CompleteMultipartUpload", "", ""},
		{"no checksums", drop(sumHeader), "lacks checks of x-amz-checksum-crc32c", "", ""},
		{"no conditions", drop("If-Match"), "lacks conditional GET", "", ""},
		{"stale list", func(kind string, _ int, _ *http.Request) *fault {
			if kind == "GET list-type" {
				return &fault{status: 200, body: "<ListBucketResult></ListBucketResult>"}
			}
			return nil
		}, "lacks a LIST", "", ""},
		{"expiration", rule("<Filter><Prefix></Prefix></Filter><Expiration><Days>30</Days></Expiration>"), `lifecycle rule "r" expires`, "", ""},
		{"expiration above", rule("<Prefix>p/</Prefix><Expiration><Days>30</Days></Expiration>"), `lifecycle rule "r" expires`, "", ""},
		{"expiration below", rule("<Filter><Prefix>p/run/</Prefix></Filter><Expiration><Date>2030-01-01T00:00:00Z</Date></Expiration>"), `lifecycle rule "r" expires`, "", ""},
		{"expiration elsewhere", rule("<Filter><Prefix>q/</Prefix></Filter><Expiration><Days>30</Days></Expiration>"), "", "no lifecycle rule removes unfinished", ""},
		{"expiration by tag", rule("<Filter><Tag><Key>a</Key><Value>b</Value></Tag></Filter><Expiration><Days>30</Days></Expiration>"), "", "no lifecycle rule removes unfinished", ""},
		{"aborts", rule("<Filter><Prefix></Prefix></Filter><AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload>"), "", "object lock", "unfinished uploads: add"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake()
			f.fault = c.fault
			found, err := f.bucket(t, Options{}).Probe(t.Context())
			if c.fails == "" && err != nil || c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails) || !slices.Contains(problem.Kinds(err), problem.Invalid)) {
				t.Errorf("%v, want %q", err, c.fails)
			}
			warnings := strings.Join(found.Warnings, "\n")
			if !strings.Contains(warnings, c.warns) || c.silent != "" && strings.Contains(warnings, c.silent) {
				t.Errorf("warnings %s", warnings)
			}
			if len(f.objects) > 0 {
				t.Errorf("left %d objects", len(f.objects))
			}
		})
	}
}
