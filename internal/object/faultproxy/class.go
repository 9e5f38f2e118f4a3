package faultproxy

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Class is what a request asks of an S3 server.
type Class int

// The classes. Counts and faults distinguish them.
const (
	Other       Class = iota // none of the following, such as tags of an object
	Get                      // GET of an object, or of a range
	Head                     // HEAD of an object
	List                     // GET of a bucket: its keys, or their versions
	Put                      // PUT of an object
	Copy                     // PUT of an object with the bytes of another
	Create                   // POST that begins a multipart upload
	Part                     // PUT of a part
	PartCopy                 // PUT of a part with bytes of an object
	Complete                 // POST that ends a multipart upload
	Abort                    // DELETE of a multipart upload
	ListParts                // GET of a multipart upload
	ListUploads              // GET of a bucket: its multipart uploads
	Delete                   // DELETE of an object
	DeleteMany               // POST that deletes objects
	Bucket                   // any other request for a bucket, or for the list of them
	classes
)

var classNames = [classes]string{
	"other", "get", "head", "list", "put", "copy", "create", "part", "part copy", "complete",
	"abort", "list parts", "list uploads", "delete", "delete many", "bucket",
}

// String returns the name of a class.
func (c Class) String() string {
	if c < 0 || c >= classes {
		return "unknown"
	}
	return classNames[c]
}

// Request describes a request to the functions that choose requests.
type Request struct {
	Number int // of the request at this proxy, from 1
	Class  Class
	Method string
	Bucket string
	Key    string // "" for a request for a bucket
	Query  url.Values
	Header http.Header // must not be changed
	Size   int64       // of the body; -1 if unknown
}

// describe describes a request in path style, http://server/bucket/key.
func describe(r *http.Request) Request {
	d := Request{Method: r.Method, Query: r.URL.Query(), Header: r.Header, Size: r.ContentLength}
	d.Bucket, d.Key, _ = strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	d.Class = d.classify()
	return d
}

func (d Request) classify() Class {
	if d.Key == "" {
		return d.bucketClass()
	}
	upload := d.Query.Has("uploadId")
	copied := d.Header.Get("X-Amz-Copy-Source") != ""
	switch d.Method {
	case http.MethodGet:
		if upload {
			return ListParts
		}
		if !d.hasAny("acl", "attributes", "legal-hold", "retention", "tagging", "torrent") {
			return Get
		}
	case http.MethodHead:
		return Head
	case http.MethodPut:
		switch {
		case upload && copied:
			return PartCopy
		case upload:
			return Part
		case d.hasAny("acl", "legal-hold", "retention", "tagging"):
			return Other
		case copied:
			return Copy
		}
		return Put
	case http.MethodPost:
		switch {
		case upload:
			return Complete
		case d.Query.Has("uploads"):
			return Create
		}
	case http.MethodDelete:
		if upload {
			return Abort
		}
		if !d.Query.Has("tagging") {
			return Delete
		}
	}
	return Other
}

// listing are the parameters of a list of keys. All others name a property of the bucket.
var listing = []string{
	"continuation-token", "delimiter", "encoding-type", "fetch-owner", "key-marker", "list-type",
	"marker", "max-keys", "prefix", "start-after", "version-id-marker", "versions", "x-id",
}

func (d Request) bucketClass() Class {
	switch {
	case d.Bucket == "":
		return Bucket
	case d.Method == http.MethodPost && d.Query.Has("delete"):
		return DeleteMany
	case d.Method != http.MethodGet:
		return Bucket
	case d.Query.Has("uploads"):
		return ListUploads
	}
	for name := range d.Query {
		if !slices.Contains(listing, name) {
			return Bucket
		}
	}
	return List
}

func (d Request) hasAny(names ...string) bool { return slices.ContainsFunc(names, d.Query.Has) }

// Of returns a function for [Fault.Match] that chooses the requests of some classes.
func Of(list ...Class) func(Request) bool {
	return func(r Request) bool { return slices.Contains(list, r.Class) }
}
