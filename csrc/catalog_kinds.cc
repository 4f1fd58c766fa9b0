// The kinds of catalogs that there are: the one place that knows them all. See catalog.h.
#include "catalog.h"
#include "pmemobj/pmemobj_catalog.h"

namespace lightckpt {

Status create_catalog(const std::string& store, const Header& header) {
  if (static_cast<CatalogKind>(header.catalog) == CatalogKind::kLines) return {};
  return PmemobjCatalog::create(PmemobjCatalog::path_of(store), header);
}

Status open_catalog(const std::string& store, const Header& header, Media* media,
                    std::unique_ptr<Catalog>* catalog) {
  if (static_cast<CatalogKind>(header.catalog) == CatalogKind::kLines) {
    *catalog = std::make_unique<LineCatalog>(media, header.slot_count);
    return {};
  }
  if (store.empty()) return {Code::kInvalid, "its catalog lies beside a file, and this is none"};
  return PmemobjCatalog::open(PmemobjCatalog::path_of(store), header, catalog);
}

}  // namespace lightckpt
