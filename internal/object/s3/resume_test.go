package s3

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// TestResume leaves uploads as a killed process does, and continues them on a real server.
func TestResume(t *testing.T) {
	server := s3test.Start(t, s3test.Options{})
	before, data := bucketOf(t, server, server.Endpoint, "p"), noise(3*leastPart+1000)
	other := bytes.Clone(data)
	other[leastPart+7] ^= 1
	for _, c := range []struct {
		name   string
		sent   []byte // by the process that died
		parts  int
		commit bool                                                     // it died after the commit
		then   func(*testing.T, *Bucket, string, object.Unfinished)     // before the resumption
		change func(object.Unfinished) (object.Unfinished, object.Mode) // of what the next process knows
		lost   bool                                                     // the upload ends once its parts were listed
		want   Requests                                                 // of the resumption
		err    error
	}{
		{name: "no part", sent: data, want: Requests{List: 1, Part: 4, Complete: 1}},
		{name: "two parts", sent: data, parts: 2, want: Requests{List: 1, Part: 2, Complete: 1}},
		{name: "all parts", sent: data, parts: 4, want: Requests{List: 1, Complete: 1}},
		{name: "a part of other bytes", sent: other, parts: 3, want: Requests{List: 1, Part: 2, Complete: 1}},
		{name: "committed", sent: data, parts: 4, commit: true, want: Requests{List: 1, Head: 1}},
		{name: "other bytes committed", sent: other, parts: 4, commit: true, want: Requests{List: 1, Head: 1}, err: fs.ErrExist},
		{
			name: "committed by another upload", sent: data, parts: 1,
			then: func(t *testing.T, b *Bucket, name string, left object.Unfinished) {
				if err := errors.Join(b.Discard(t.Context(), name, left), gathered(t, b, name, data, object.Exclusive)); err != nil {
					t.Fatal(err)
				}
			},
			want: Requests{List: 1, Head: 2, Create: 1, Part: 4, Complete: 1, Abort: 1}, err: fs.ErrExist,
		},
		{
			name: "discarded", sent: data, parts: 2,
			then: func(t *testing.T, b *Bucket, name string, left object.Unfinished) {
				for range 2 {
					if err := b.Discard(t.Context(), name, left); err != nil {
						t.Fatal(err)
					}
				}
			},
			want: Requests{List: 1, Head: 1, Create: 1, Part: 4, Complete: 1},
		},
		{name: "lost before the last parts", sent: data, parts: 2, lost: true, want: Requests{List: 1, Part: 5, Abort: 1, Create: 1, Complete: 1}},
		{name: "lost before the commit", sent: data, parts: 4, lost: true, want: Requests{List: 1, Head: 1, Part: 4, Abort: 1, Create: 1, Complete: 2}},
		{
			name: "a piece that cannot be", sent: data, parts: 2,
			change: func(left object.Unfinished) (object.Unfinished, object.Mode) {
				left.Piece = 1
				return left, object.Exclusive
			},
			want: Requests{Abort: 1, Create: 1, Part: 4, Complete: 1},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var left object.Unfinished
			u, err := before.Create(context.WithoutCancel(t.Context()), c.name, int64(len(c.sent)), object.Exclusive)
			if err != nil {
				t.Fatal(err)
			}
			begun := 0
			u.(object.Outliving).OnBegin(func(_ context.Context, as object.Unfinished) error {
				begun++
				left = as
				return nil
			})
			if _, err := u.(*upload).begin(t.Context()); err != nil {
				t.Fatal(err)
			}
			writePieces(t, u, c.sent, c.parts)
			if begun != 1 || left.ID == "" || left.Token == "" || left.Piece != leastPart {
				t.Fatalf("the upload began %d times as %+v", begun, left)
			}
			if c.commit {
				if err := u.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if c.then != nil {
				c.then(t, before, c.name, left)
			}
			mode := object.Exclusive
			if c.change != nil {
				left, mode = c.change(left)
			}

			b := bucketOf(t, server, server.Endpoint, "p")
			u, err = b.Resume(t.Context(), c.name, int64(len(data)), mode, left)
			if err != nil {
				t.Fatal(err)
			}
			if c.lost {
				if err := before.Discard(t.Context(), c.name, left); err != nil {
					t.Fatal(err)
				}
			}
			writePieces(t, u, data, 4)
			if err := u.Commit(t.Context()); !errors.Is(err, c.err) {
				t.Fatalf("commit: %v, want %v", err, c.err)
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
			got := b.Requests()
			got.Sent, got.Received, got.Repeated = 0, 0, 0
			if c.lost && got.Part == c.want.Part+1 && got.List == c.want.List+1 {
				// The server closed the connection before its refusal was read, twice.
				got.Part, got.List = c.want.Part, c.want.List
			} else if c.lost && got.Part == c.want.Part+1 {
				got.Part = c.want.Part // once
			}
			if got != c.want {
				t.Errorf("resumed with %v, want %v", got, c.want)
			}
			want := data
			if c.err != nil && c.commit {
				want = c.sent
			}
			if now, err := b.Get(t.Context(), c.name, int64(len(want))); err != nil || !bytes.Equal(now, want) {
				t.Errorf("the object has %d bytes, or others: %v", len(now), err)
			}
			if _, err := b.parts(t.Context(), b.at.key(c.name), left.ID); !isNoUpload(err) {
				t.Errorf("the upload is left: %v", err)
			}
		})
	}
}

// writePieces sends the first pieces of a file.
func writePieces(t *testing.T, u object.Upload, data []byte, pieces int) {
	t.Helper()
	for i := range pieces {
		at := i * u.Piece()
		p := data[at:min(at+u.Piece(), len(data))]
		if err := u.(object.Gatherer).WriteFrom([][]byte{p}, int64(at), crc32c.Checksum(p)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUnrecordedUpload makes sure that no byte is sent for an upload that was not recorded.
func TestUnrecordedUpload(t *testing.T) {
	f := newFake()
	b := f.bucket(t, Options{PartSize: piece})
	u, err := b.Create(t.Context(), "f", 2*piece, object.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Abort()
	full := errors.New("the log is full")
	u.(object.Outliving).OnBegin(func(context.Context, object.Unfinished) error { return full })
	if _, err := u.WriteAt(noise(piece), 0); !errors.Is(err, full) {
		t.Errorf("write: %v", err)
	}
	u.Abort()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if got := b.Requests(); got.Part != 0 || got.Abort != got.Create || len(f.uploads) != 0 {
		t.Errorf("requests: %v; uploads left: %d", got, len(f.uploads))
	}
}
